"""A real engine over the JAX backend for tests: submit requests, wait for all of them, look at what came out."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from backends.jax.attention import AttentionInputs
from backends.jax.backend import JaxBackend
from backends.jax.model import Params
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_connector import KVConnector
from engine.request import EngineRequest, RequestOutput, SamplingParams, TokenLogprobs
from tests import options as test_options

WAIT_S = 120.0


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str = ""
    num_cached_tokens: int = 0


class Engine:
    def __init__(
        self,
        *,
        connector: KVConnector | None = None,
        make_backend: Callable[[EngineConfig], Any] = JaxBackend,
        **options: Any,
    ) -> None:
        defaults = {
            "dtype": "float32",
            "backend": "cpu",
            "tensor_parallel_size": test_options.tensor_parallel_size,
        }
        self.config = EngineConfig.from_args({**defaults, **options})
        self.backend = make_backend(self.config)
        self._outputs: queue.Queue[list[RequestOutput]] = queue.Queue()
        self.core = EngineCore(self.config, self.backend, self._outputs.put, connector)
        self.info = self.core.load()
        self.core.start()
        self._count = 0

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams] | SamplingParams
    ) -> list[Answer]:
        """Submits all prompts at once and waits for all answers."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers: dict[str, Answer] = {}
        for prompt, params in zip(prompts, each, strict=True):
            name = f"request-{self._count}"
            self._count += 1
            answers[name] = Answer()
            self.core.submit(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params))
        running = set(answers)
        while running:
            for output in self._outputs.get(timeout=WAIT_S):
                answer = answers[output.request_id]
                assert output.error is None, output.error
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or ()
                answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
                answer.num_cached_tokens = output.num_cached_tokens
                if output.finish_reason:
                    answer.finish_reason = output.finish_reason
                    running.remove(output.request_id)
        return list(answers.values())

    def close(self) -> None:
        self.core.stop()
        self.backend.close()


def prompt_logits(backend: JaxBackend, prompt: Sequence[int]) -> Any:
    """Logits at every position of a prompt, straight from the decoder, with blocks 0, 1, … as its cache."""
    count = len(prompt)
    deployment, params, state = backend._deployment, backend._params, backend._state
    inputs = AttentionInputs(
        positions=jnp.arange(count),
        token_rows=jnp.zeros(count, jnp.int32),
        query_starts=jnp.array([0, count], jnp.int32),
        kv_lens=jnp.array([count], jnp.int32),
        block_tables=jnp.arange(4, dtype=jnp.int32)[None],
        num_rows=jnp.array([1], jnp.int32),
        num_tokens=jnp.array([count], jnp.int32),
        decode_only=False,
    )

    def one_chip(params: Params, cache: jax.Array) -> jax.Array:
        decoder = deployment.decoder
        hidden, _ = decoder(params, cache, jnp.array(prompt, jnp.int32), inputs)
        return decoder.logits(params, hidden, jnp.array([count], jnp.int32))

    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state.cache))
    vocabulary = PartitionSpec(None, "model")
    logits = jax.jit(
        jax.shard_map(one_chip, mesh=deployment.mesh, in_specs=specs, out_specs=vocabulary, check_vma=False)
    )
    return np.asarray(logits(params, state.cache))[:, : deployment.model.vocab_size]


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    started = Engine(**options)
    try:
        yield started
    finally:
        started.close()
