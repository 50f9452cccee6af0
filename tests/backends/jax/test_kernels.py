"""The native kernels and the XLA formulations against float64 formulas, over random ragged shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.jax import native
from backends.jax.attention import AttentionInputs, NativeAttention, PagedAttention, XlaAttention
from backends.jax.compilation import default_cache_dir
from backends.jax.logits import RowParams
from backends.jax.native.build import BuildError
from backends.jax.sampling import sample_native, sample_xla
from backends.jax.weights import DenseWeight, PackedWeight
from tests.backends.jax.references import causal_attention, cut_distribution

ROUNDING = {"float32": 2e-6, "bfloat16": 4e-3}
"""Largest error relative to the largest value: a float32 sum; keys and values of 8 bits."""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    try:
        native.load_kernels(default_cache_dir())
    except BuildError as error:
        pytest.skip(f"no native kernels on this machine: {error}")


@dataclass
class Ragged:
    """A random step: rows with some KV in the cache and some new tokens."""

    query_lens: list[int]
    kv_lens: list[int]


@st.composite
def ragged_steps(draw: st.DrawFn) -> Ragged:
    rows = draw(st.integers(1, 6))
    new = [draw(st.one_of(st.just(1), st.integers(1, 70))) for _ in range(rows)]
    old = [draw(st.one_of(st.just(0), st.integers(0, 200))) for _ in range(rows)]
    return Ragged(new, [a + b for a, b in zip(new, old, strict=True)])


HEADS = st.sampled_from([(4, 4), (6, 2), (4, 1), (9, 3)])


@settings(max_examples=40, deadline=None)
@given(
    step=ragged_steps(),
    heads=HEADS,
    dim=st.sampled_from([16, 64, 96]),
    block_size=st.sampled_from([8, 16, 32, 2048]),
    window=st.sampled_from([None, 1, 20, 100]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**31),
)
def test_native_attention_over_random_ragged_batches(
    step: Ragged, heads: tuple[int, int], dim: int, block_size: int, window: int | None, dtype: str, seed: int
) -> None:
    attention = NativeAttention(
        num_layers=2,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        block_size=block_size,
        window=window,
        dtype=dtype,
    )
    check_attention(attention, step, seed)


@settings(max_examples=12, deadline=None)
@given(
    step=ragged_steps(),
    window=st.sampled_from([None, 20]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**31),
)
def test_xla_attention_over_random_ragged_batches(step: Ragged, window: int | None, dtype: str, seed: int) -> None:
    attention = XlaAttention(
        num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, block_size=8, window=window, dtype=dtype
    )
    check_attention(attention, step, seed)


def check_attention(attention: PagedAttention, step: Ragged, seed: int) -> None:
    """Fills the cache with each row's older tokens in one step, runs the new ones in a second, compares both layers."""
    rng = np.random.default_rng(seed)
    block = attention.block_size
    blocks_per_row = [-(-n // block) for n in step.kv_lens]
    ids = rng.permutation(sum(blocks_per_row)).astype(np.int32)
    tables = np.zeros((len(step.kv_lens), max(blocks_per_row)), np.int32)
    for row, count in enumerate(blocks_per_row):
        tables[row, :count], ids = ids[:count], ids[count:]
    spec = attention.cache_shape(sum(blocks_per_row))
    cache = jnp.zeros(spec.shape, spec.dtype)

    def rounded(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32)
        return values.astype(ml_dtypes.bfloat16).astype(np.float32) if attention.dtype == "bfloat16" else values

    d, kv = attention.head_dim, attention.num_kv_heads
    keys = [rounded(n, kv, d) for n in step.kv_lens]
    values = [rounded(n, kv, d) for n in step.kv_lens]
    queries = [rng.standard_normal((n, attention.num_heads, d), np.float32) for n in step.kv_lens]
    old = [total - new for total, new in zip(step.kv_lens, step.query_lens, strict=True)]
    layer = int(rng.integers(0, attention.num_layers))
    if any(old):
        rows = [r for r, n in enumerate(old) if n]
        parts = [(queries[r][: old[r]], keys[r][: old[r]], values[r][: old[r]]) for r in rows]
        _, cache = run_attention(attention, cache, layer, parts, [old[r] for r in rows], tables[rows])
    parts = [(queries[r][o:], keys[r][o:], values[r][o:]) for r, o in enumerate(old)]
    out, cache = run_attention(attention, cache, layer, parts, step.kv_lens, tables)
    start = 0
    for row, new in enumerate(step.query_lens):
        expected = causal_attention(
            queries[row][old[row] :].astype(np.float64),
            keys[row].astype(np.float64),
            values[row].astype(np.float64),
            attention.window,
        )
        tolerance = 6e-3 if attention.dtype == "bfloat16" and isinstance(attention, XlaAttention) else 1e-5
        np.testing.assert_allclose(out[start : start + new], expected, atol=tolerance * max(1, np.abs(expected).max()))
        start += new


def run_attention(
    attention: PagedAttention,
    cache: jax.Array,
    layer: int,
    parts: list[tuple[Any, Any, Any]],
    kv_lens: list[int],
    tables: Any,
) -> tuple[Any, jax.Array]:
    """One layer's attention of a step, padded by some tokens and two rows; returns the valid tokens' outputs."""
    lengths = [len(q) for q, _, _ in parts]
    tokens, rows = sum(lengths), len(lengths)
    decode_only = tokens == rows
    padding = 2 if decode_only else 5

    def flat(index: int) -> Any:
        joined = np.concatenate([part[index] for part in parts])
        return np.concatenate([joined, np.zeros((padding, *joined.shape[1:]), np.float32)])

    positions = np.concatenate([np.arange(k - n, k) for n, k in zip(lengths, kv_lens, strict=True)])
    starts = np.concatenate([[0], np.cumsum(lengths), [tokens, tokens]])
    inputs = AttentionInputs(
        positions=jnp.asarray(np.pad(positions, (0, padding)), jnp.int32),
        token_rows=jnp.asarray(np.pad(np.repeat(np.arange(rows), lengths), (0, padding)), jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        kv_lens=jnp.asarray(np.pad(kv_lens, (0, 2)), jnp.int32),
        block_tables=jnp.asarray(np.pad(tables, ((0, 2), (0, 0)))),
        num_rows=jnp.array([rows], jnp.int32),
        num_tokens=jnp.array([tokens], jnp.int32),
        decode_only=decode_only,
    )
    run = jax.jit(attention.__call__, donate_argnums=3)
    out, cache = run(flat(0), flat(1), flat(2), cache, jnp.int32(layer), inputs)
    return np.asarray(out)[:tokens], cache


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    padding=st.integers(0, 3),
    out=st.sampled_from([1, 31, 32, 100, 257]),
    inner=st.sampled_from([2, 64, 130]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    layer=st.integers(0, 2),
)
def test_packed_linear_equals_the_product(
    rows: int, padding: int, out: int, inner: int, dtype: str, layer: int
) -> None:
    rng = np.random.default_rng(rows * 1000 + out)
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    weights = rng.standard_normal((3, out, inner), np.float32).astype(stored)
    packed = jnp.asarray(np.stack([native.pack_weight(w) for w in weights]))
    leaf = PackedWeight(data=packed, layer=jnp.int32(layer), out_features=out)
    x = rng.standard_normal((rows + padding, inner), np.float32)
    y = np.asarray(jax.jit(lambda leaf, x, n: leaf.linear(x, n))(leaf, x, jnp.array([rows], jnp.int32)))
    expected = x[:rows].astype(np.float64) @ weights[layer].astype(np.float64).T
    np.testing.assert_allclose(y[:rows], expected, atol=2e-6 * max(1.0, np.abs(expected).max()) * inner**0.5)
    assert not y[rows:].any()


def test_a_rows_product_does_not_depend_on_the_other_rows() -> None:
    rng = np.random.default_rng(0)
    weight = jnp.asarray(native.pack_weight(rng.standard_normal((96, 64), np.float32))[None])
    leaf = PackedWeight(data=weight, layer=jnp.int32(0), out_features=96)
    x = rng.standard_normal((64, 64), np.float32)
    together = np.asarray(leaf.linear(x, jnp.array([64], jnp.int32)))
    for row in range(64):
        alone = np.asarray(leaf.linear(x[row : row + 1], jnp.array([1], jnp.int32)))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_rows_come_back_from_packed_weights(dtype: str) -> None:
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    table = np.random.default_rng(1).standard_normal((77, 6), np.float32).astype(stored)
    packed = PackedWeight(data=jnp.asarray(native.pack_weight(table)[None]), layer=jnp.int32(0), out_features=77)
    dense = DenseWeight(data=jnp.asarray(table))
    ids = jnp.array([0, 31, 32, 76, 5])
    np.testing.assert_array_equal(packed.take_rows(ids), table[np.asarray(ids)].astype(np.float32))
    np.testing.assert_array_equal(dense.take_rows(ids), packed.take_rows(ids))


def sampling_rows(count: int, **changes: Any) -> RowParams:
    defaults: dict[str, Any] = {
        "slots": np.zeros(count, np.int32),
        "lengths": np.arange(count, dtype=np.int32),
        "samples": np.ones(count, np.bool_),
        "temperature": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "repetition_penalty": np.ones(count, np.float32),
        "presence_penalty": np.zeros(count, np.float32),
        "frequency_penalty": np.zeros(count, np.float32),
        "seed": np.tile(np.array([[1, 2]], np.uint32), (count, 1)),
        "prompt_len": np.zeros(count, np.int32),
        "min_len": np.zeros(count, np.int32),
        "rewrites": np.zeros(count, np.bool_),
    }
    defaults.update(changes)
    return RowParams(**{name: jnp.asarray(value) for name, value in defaults.items()})


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 8, 0.6, 0.0),
        (1.0, 0, 1.0, 0.2),
        (2.0, 12, 0.9, 0.05),
    ],
)
@pytest.mark.parametrize("sampler", [sample_native, sample_xla])
def test_samples_follow_the_cut_distribution(
    sampler: Any, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    count, vocab = 4000, 37
    logits = (np.random.default_rng(3).standard_normal(vocab) * 2).astype(np.float32)
    rows = sampling_rows(
        count,
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
    )
    ids = np.asarray(jax.jit(sampler)(np.tile(logits, (count, 1)), rows, jnp.array([count], jnp.int32)))
    expected = cut_distribution(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    found = np.bincount(ids, minlength=vocab) / count
    assert not found[expected == 0].any(), "a token was drawn that the cuts exclude"
    # Five standard deviations of a binomial share, and a little for rare tokens.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-3).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), top_k=st.integers(0, 40), top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5))
def test_both_samplers_draw_the_same_tokens(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    count, vocab = 64, 300
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)
    rows = sampling_rows(
        count,
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], count).astype(np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
    )
    num_rows = jnp.array([count], jnp.int32)
    ours, plain = (np.asarray(jax.jit(s)(logits, rows, num_rows)) for s in (sample_native, sample_xla))
    # Rounding may move a draw across the border between two tokens, or a token across a cut: rarely.
    assert (ours != plain).sum() <= 2
    greedy = np.asarray(rows.temperature) == 0
    np.testing.assert_array_equal(ours[greedy], logits.argmax(-1)[greedy])
