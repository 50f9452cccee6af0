"""What int8 weights cost in accuracy: next-token distributions against float32 over running text, on CPU.

    python -m bench.int8_accuracy [--model smollm2] [--text FILE] [--tokens 1024]

Prints a Markdown table: mean and 99th percentile of the Kullback-Leibler divergence from float32's distribution, how
often the likeliest token is the same, and the perplexity of the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from backends.jax.attention import AttentionInputs
from backends.jax.deployment import Deployment
from backends.jax.kernels import choose_kernels
from backends.jax.loading import ParameterLoader
from backends.jax.model import Params
from backends.jax.open_model import open_model
from backends.jax.sharding import create_mesh
from engine.backend import no_progress
from engine.config import EngineConfig
from engine.text.tokenizer import load_tokenizer

DEFAULT_TEXT = Path(__file__).parent.parent / "docs" / "architecture.md"
CONTEXT = 256  # tokens of one sequence; the text is cut into such pieces
Logits = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    dtype: str
    quantization: str | None = None
    keeps_embedding: bool = False  # in float32, the output projection too where the model ties them


REFERENCE = Variant(name="float32", dtype="float32")
VARIANTS = (
    Variant(name="bfloat16", dtype="bfloat16"),
    Variant(name="int8, float32", dtype="float32", quantization="int8"),
    Variant(name="int8, bfloat16", dtype="bfloat16", quantization="int8"),
    Variant(name="int8 but for the embedding, float32", dtype="float32", quantization="int8", keeps_embedding=True),
)


def load(variant: Variant, model_name: str) -> tuple[Deployment, Params]:
    config = EngineConfig(
        model=model_name, dtype=variant.dtype, quantization=variant.quantization, max_running_seqs=1, backend="cpu"
    )
    model, checkpoint = open_model(config)
    mesh = create_mesh(jax.local_devices()[:1])
    deployment = Deployment(config, model, mesh, kernels=choose_kernels(config, model, "cpu"))
    return deployment, ParameterLoader(deployment.layout, checkpoint, no_progress).load()


def logits_of(deployment: Deployment, params: Params) -> Callable[[NDArray[np.int32]], Logits]:
    """A function from one sequence [t] to the logits of each position's successor [t, vocab]."""
    decoder = deployment.decoder
    blocks = -(-CONTEXT // deployment.config.block_size)
    cache = deployment.attention.cache_shape(blocks)

    @jax.jit
    def run(params: Params, ids: jax.Array) -> jax.Array:
        count = jnp.array([CONTEXT], jnp.int32)
        inputs = AttentionInputs(
            positions=jnp.arange(CONTEXT, dtype=jnp.int32),
            token_rows=jnp.zeros(CONTEXT, jnp.int32),
            query_starts=jnp.array([0, CONTEXT], jnp.int32),
            kv_lens=count,
            block_tables=jnp.arange(blocks, dtype=jnp.int32)[None],
            num_rows=jnp.array([1], jnp.int32),
            num_tokens=count,
            decode_only=False,
        )
        hidden, _ = decoder(params, jnp.zeros(cache.shape, cache.dtype), ids, inputs)
        return decoder.logits(params, hidden, count)

    return lambda ids: np.asarray(run(params, jnp.asarray(ids)), np.float64)


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def compare(pieces: NDArray[np.int32], expected: list[Logits], found: list[Logits]) -> str:
    """A table row: divergences, agreement, perplexity."""
    divergences, agreements, surprises = [], [], []
    for ids, p, q in zip(pieces, expected, found, strict=True):
        divergences.append((np.exp(p) * (p - q)).sum(-1))
        agreements.append(p.argmax(-1) == q.argmax(-1))
        surprises.append(-q[np.arange(CONTEXT - 1), ids[1:]])
    kl = np.concatenate(divergences)
    agreement, perplexity = np.concatenate(agreements).mean(), np.exp(np.concatenate(surprises).mean())
    return f"{kl.mean():.5f} | {np.quantile(kl, 0.99):.4f} | {agreement:.1%} | {perplexity:.3f}"


def tokens_of(model_name: str, text: str, count: int) -> NDArray[np.int32]:
    """The text's first tokens, [pieces, CONTEXT]."""
    ids = load_tokenizer(EngineConfig(model=model_name)).encode(text)
    available = min(count, len(ids))
    pieces = available // CONTEXT
    if pieces == 0:
        raise SystemExit(f"{available} tokens are too few: text and --tokens must have {CONTEXT} at least")
    return np.array(ids[: pieces * CONTEXT], np.int32).reshape(pieces, CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # libtpu may be installed, as a compiler
    pieces = tokens_of(args.model, args.text.read_text(), args.tokens)
    deployment, reference = load(REFERENCE, args.model)
    run = logits_of(deployment, reference)
    expected = [log_softmax(run(ids)) for ids in pieces]
    print(f"{pieces.size} tokens of {args.text.name}\n")
    print("| | weights, MiB | mean KL | 99 % KL | same top token | perplexity |\n| --- | --- | --- | --- | --- | --- |")
    print(f"| float32 | {_mib(reference)} | {compare(pieces, expected, expected)} |")
    for variant in VARIANTS:
        deployment, params = load(variant, args.model)
        if variant.keeps_embedding:
            params = {**params, "embed": reference["embed"]}
        run = logits_of(deployment, params)
        found = [log_softmax(run(ids)) for ids in pieces]
        print(f"| {variant.name} | {_mib(params)} | {compare(pieces, expected, found)} |", flush=True)


def _mib(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) >> 20


if __name__ == "__main__":
    main()
