"""KV that one engine computed and another one goes on with: any layouts, block sizes and tensor-parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax import native
from backends.jax.attention import LibraryAttention, NativeAttention, PagedAttention, PallasAttention, XlaAttention
from backends.jax.backend import JaxBackend
from backends.jax.compilation import default_cache_dir
from backends.jax.deployment import Deployment
from backends.jax.kernels import Kernels
from backends.jax.kv_exchange import BATCH_BYTES, KVExchange
from backends.jax.kv_layouts import block_layout
from backends.jax.sharding import create_mesh
from backends.jax.topology import open_topology
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVLostError, LocalPayload
from engine.request import SamplingParams
from tests.backends.jax.configs import LLAMA_8B
from tests.backends.jax.engine import Answer, Engine
from tests.backends.models import tiny_llama
from tests.engine.loopback import DecodeConnector, PrefillEngine

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "backend": "cpu",
    "max_running_seqs": 8,
    "max_num_batched_tokens": 32,
    "prefill_len_padding": 16,
    "max_model_len": 192,
    "num_blocks": 60,
    "warmup": False,
}
SHAPES = [(3, 64, 32), (2, 16, 8), (1, 128, 16), (5, 96, 64)]  # kv heads, head_dim, block_size


def bits(shape: tuple[int, ...], dtype: str) -> Any:
    """Random numbers, as the integers that stand for them."""
    values = np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype))
    return values.view(f"u{values.dtype.itemsize}")


@pytest.mark.parametrize("kind", [NativeAttention, XlaAttention, PallasAttention, LibraryAttention])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), SHAPES)
def test_every_layout_gives_back_what_was_written(
    kind: type[PagedAttention], dtype: str, kv_heads: int, head_dim: int, block_size: int
) -> None:
    attention = kind(
        num_layers=2,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=None,
        dtype=dtype,
    )
    layout = block_layout(attention)
    native.load_kernels(default_cache_dir())
    spec = attention.cache_shape(6)
    before = jnp.ones(spec.shape, spec.dtype)
    ids, kept = jnp.array([4, 1, 0, 5], jnp.int32), 3
    data = bits((2, 2, kv_heads, 4 * block_size, head_dim), dtype)
    read, write = jax.jit(layout.read), jax.jit(layout.write)
    old = np.asarray(read(before, ids, np.int32(4)))
    cache = write(before, data, ids, np.int32(3), np.int32(kept))
    assert cache.shape == spec.shape
    assert cache.dtype == spec.dtype
    found = np.asarray(read(cache, ids, np.int32(4)))
    assert np.array_equal(found[:, :, :, kept : 3 * block_size], data[:, :, :, kept : 3 * block_size])
    assert np.array_equal(found[:, :, :, :kept], old[:, :, :, :kept])
    assert np.array_equal(found[:, :, :, 3 * block_size :], old[:, :, :, 3 * block_size :])
    untouched = np.asarray(cache)[:, [2, 3, 6]]
    assert np.array_equal(untouched, np.asarray(before)[:, [2, 3, 6]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_heads=8, num_kv_heads=2, head_dim=16)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 320, length).tolist() for length in (100, 64, 33, 7, 90, 65)]
    prompts[-1] = prompts[0][:64] + prompts[-1][:20]
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    features: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 2**63 + 11},
        {"temperature": 0.8, "seed": 4, "top_p": 0.8, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "bad_words": ((7,), (8, 9))},
        {"temperature": 1.1, "seed": 5, "logit_bias": {5: 2.0, 319: 4.0}},
        {"min_tokens": 6, "stop_token_ids": tuple(range(3, 30))},
    ]
    return prompts, [replace(greedy, **each) for each in features]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Answer]:
    """What one engine without any exchange answers."""
    running = Engine(model=str(model), **{**SMALL, "tensor_parallel_size": 1})
    answers = running.run(*requests())
    running.close()
    return answers


@contextmanager
def pair(model: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> Iterator[tuple[Engine, DecodeConnector]]:
    config = EngineConfig.from_args({"model": str(model), **SMALL, **prefill})
    first = PrefillEngine(config, JaxBackend(config))
    connector = DecodeConnector(first)
    second = Engine(model=str(model), connector=connector, **{**SMALL, **decode})
    try:
        yield second, connector
    finally:
        second.close()
        first.stop()


def side(chips: int, attention: str, block_size: int) -> dict[str, Any]:
    return {"tensor_parallel_size": chips, "attention": attention, "block_size": block_size}


ALWAYS = [
    (side(1, "native", 8), side(2, "native", 32)),
    (side(4, "native", 32), side(3, "xla", 8)),
]
MATRIX = [
    pytest.param(side(p, a, x), side(d, b, y), marks=pytest.mark.matrix)
    for p, a, x in ((1, "native", 16), (2, "xla", 32), (4, "native", 8), (8, "native", 16))
    for d, b, y in ((1, "native", 8), (2, "native", 16), (3, "xla", 32), (8, "native", 32))
]


@pytest.mark.parametrize(("prefill", "decode"), [*ALWAYS, *MATRIX], ids=lambda o: "-".join(map(str, o.values())))
def test_an_engine_goes_on_with_what_another_one_has_computed(
    model: Path, alone: list[Answer], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    prompts, sampling = requests()
    with pair(model, prefill, decode) as (running, connector):
        answers = running.run(prompts, sampling)
        assert connector.num_fetched == len(prompts)
        values = running.core.metrics().values
        assert values["kv_imported_tokens"] == sum(map(len, prompts))
        assert values["kv_import_failures"] == 0
    for answer, expected in zip(answers, alone, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)
        for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4


def test_nothing_compiles_after_warm_up_when_kv_is_exchanged(model: Path) -> None:
    config = EngineConfig.from_args({"model": str(model), **SMALL})
    backend = JaxBackend(config)
    backend.load()
    exchange = KVExchange(backend._deployment)
    assert exchange.sizes == (4, 32)
    cache = exchange.warm_up(backend._state.cache)
    compiled = backend.compilations_after_warmup  # without warmup, the programs themselves
    for count in (1, 4, 5, 17, 32, 40):
        ids = list(range(count))
        payload = LocalPayload(blocks=exchange.read(cache, ids, count * config.block_size - 7, 5).result())
        cache = exchange.write(cache, ids, 2, payload)
    assert backend.compilations_after_warmup == compiled
    backend.close()


def test_runs_of_tokens_are_cut_out_of_blocks_and_put_into_others(model: Path) -> None:
    config = EngineConfig.from_args({"model": str(model), **SMALL, "block_size": 8, "tensor_parallel_size": 2})
    backend = JaxBackend(config)
    backend.load()
    heads = 2
    data = bits((2, 2, heads, 300, 16), "float32")
    shares = [
        KVBlocks(format=backend.kv_format(), heads=range(head, head + 1), data=data[:, :, head : head + 1])
        for head in range(heads)
    ]
    source, target = list(range(50, 10, -1)), list(range(10))
    backend.write_blocks(source, 3, LocalPayload(blocks=shares))
    for start, count in ((0, 300), (1, 7), (13, 200), (299, 1)):
        first, last = (3 + start) // 8, -(-(3 + start + count) // 8)
        read = backend.read_blocks(source[first:last], count, (3 + start) % 8).result()
        assert [share.heads for share in read] == [range(1), range(1, 2)]
        assert all(share.data.flags.c_contiguous for share in read)
        found = np.concatenate([share.data for share in read], axis=2)
        assert np.array_equal(found, data[:, :, :, start : start + count])
    with pytest.raises(KVLostError, match=r"without heads \[1\]"):
        backend.write_blocks(target, 0, LocalPayload(blocks=shares[:1]))
    other = replace(backend.kv_format(), num_layers=3)
    with pytest.raises(KVLostError, match="another model"):
        backend.write_blocks(target, 0, LocalPayload(blocks=[replace(shares[0], format=other)]))
    backend.close()


@pytest.mark.parametrize(
    ("kernels", "chips"), [("pallas", 1), pytest.param("library", 4, marks=pytest.mark.matrix)], ids=str
)
def test_programs_for_tpus_keep_the_cache_in_place(kernels: Kernels, chips: int) -> None:
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'")
    config = EngineConfig.from_args({"max_model_len": 8192, "tensor_parallel_size": chips})
    mesh = create_mesh(open_topology("v5e:2x2")[:chips])
    deployment = Deployment(config, LLAMA_8B, mesh, kernels=kernels)
    exchange = KVExchange(deployment)
    cache = deployment.state_shapes(512).cache
    cache_bytes = math.prod(cache.shape) * cache.dtype.itemsize // chips
    for kind in ("read", "write"):
        memory = exchange.lower(kind, exchange.sizes[-1], cache).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == (cache_bytes if kind == "write" else 0)
        assert memory.temp_size_in_bytes < 2 * BATCH_BYTES
