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
from backends.jax.operations import NativeOperations, Operations, XlaOperations
from backends.jax.rope import Rotary
from backends.jax.sampling import sample_native, sample_xla
from backends.jax.weights import DenseWeight, PackedWeight
from tests.backends.jax.references import causal_attention, cut_distribution


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


@settings(max_examples=25, deadline=None)
@given(
    step=ragged_steps(),
    heads=HEADS,
    dim=st.sampled_from([16, 64, 96]),
    block_size=st.sampled_from([8, 16, 32, 2048]),
    window=st.sampled_from([None, 1, 20, 100]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rotate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_native_attention_over_random_ragged_batches(
    step: Ragged,
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    window: int | None,
    dtype: str,
    rotate: bool,
    seed: int,
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
    check_attention(attention, step, rotate, seed)


@settings(max_examples=6, deadline=None)
@given(
    step=ragged_steps(),
    window=st.sampled_from([None, 20]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rotate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_xla_attention_over_random_ragged_batches(
    step: Ragged, window: int | None, dtype: str, rotate: bool, seed: int
) -> None:
    attention = XlaAttention(
        num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, block_size=8, window=window, dtype=dtype
    )
    check_attention(attention, step, rotate, seed)


def check_attention(attention: PagedAttention, step: Ragged, rotate: bool, seed: int) -> None:
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
    # Row by row: queries, keys and values of all its tokens, side by side as a projection gives them.
    rows = [
        np.concatenate([rng.standard_normal((n, attention.num_heads, d), np.float32), rounded(n, 2 * kv, d)], 1)
        for n in step.kv_lens
    ]
    frequencies = rng.uniform(0, 1, d // 2) if rotate else np.zeros(d // 2)
    old = [total - new for total, new in zip(step.kv_lens, step.query_lens, strict=True)]
    layer = int(rng.integers(0, attention.num_layers))
    runner = Runner(attention, layer, frequencies.astype(np.float32))
    if any(old):
        early = [r for r, n in enumerate(old) if n]
        _, cache = runner.run(cache, [rows[r][: old[r]] for r in early], [old[r] for r in early], tables[early])
    out, cache = runner.run(cache, [row[o:] for row, o in zip(rows, old, strict=True)], step.kv_lens, tables)
    # Rotated keys are rounded again when they are stored; without rotation they are exact.
    tolerance = 1e-5 if attention.dtype == "float32" or not (rotate or isinstance(attention, XlaAttention)) else 2e-2
    start = 0
    for row, total, new in zip(rows, step.kv_lens, step.query_lens, strict=True):
        q, k, v = np.split(row.astype(np.float64), (attention.num_heads, attention.num_heads + kv), axis=1)
        angles = np.arange(total)[:, None, None] * frequencies
        expected = causal_attention(rotated(q, angles)[total - new :], rotated(k, angles), v, attention.window)
        scale = max(1, np.abs(expected).max())
        np.testing.assert_allclose(out[start : start + new], expected, atol=tolerance * scale)
        start += new


def rotated(x: Any, angles: Any) -> Any:
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@dataclass
class Runner:
    attention: PagedAttention
    layer: int
    frequencies: Any

    def run(self, cache: jax.Array, rows: list[Any], kv_lens: list[int], tables: Any) -> tuple[Any, jax.Array]:
        """One layer's attention of a step, padded by some tokens and two rows; returns the valid tokens' outputs."""
        lengths = [len(row) for row in rows]
        tokens, count = sum(lengths), len(lengths)
        decode_only = tokens == count
        padding = 2 if decode_only else 5
        qkv = np.pad(np.concatenate(rows), ((0, padding), (0, 0), (0, 0)))
        positions = np.concatenate([np.arange(k - n, k) for n, k in zip(lengths, kv_lens, strict=True)])
        inputs = AttentionInputs(
            positions=jnp.asarray(np.pad(positions, (0, padding)), jnp.int32),
            token_rows=jnp.asarray(np.pad(np.repeat(np.arange(count), lengths), (0, padding)), jnp.int32),
            query_starts=jnp.asarray([0, *np.cumsum(lengths), tokens, tokens], jnp.int32),
            kv_lens=jnp.asarray(np.pad(kv_lens, (0, 2)), jnp.int32),
            block_tables=jnp.asarray(np.pad(tables, ((0, 2), (0, 0)))),
            num_rows=jnp.array([count], jnp.int32),
            num_tokens=jnp.array([tokens], jnp.int32),
            decode_only=decode_only,
        )
        rotary = Rotary.at(inputs.positions, self.frequencies)
        run = jax.jit(self.attention.__call__, donate_argnums=2)
        out, cache = run(qkv, rotary, cache, jnp.int32(self.layer), inputs)
        return np.asarray(out)[:tokens], cache


@pytest.mark.parametrize("operations", [XlaOperations(), NativeOperations()])
def test_norm_and_gated_silu_equal_their_formulas(operations: Operations) -> None:
    rng = np.random.default_rng(0)
    rows = jnp.array([29], jnp.int32)
    for n in (1, 16, 70, 576):
        x = rng.standard_normal((32, n), np.float32) * 30
        weight = rng.standard_normal(n, np.float32)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
        found = np.asarray(operations.rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5, rows))
        np.testing.assert_allclose(found[:29], expected[:29], atol=3e-6 * np.abs(expected).max())
        up = rng.standard_normal((32, n), np.float32)
        expected = wide / (1 + np.exp(-wide)) * up
        found = np.asarray(operations.gated_silu(jnp.concatenate([x, up], axis=1), rows))
        np.testing.assert_allclose(found[:29], expected[:29], atol=1e-6 * np.abs(expected).max())


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


def test_cuts_over_a_large_vocabulary_keep_what_the_formula_keeps() -> None:
    """Small min-p and top-p together: tokens near the cuts are many, and their weights tiny."""
    rng = np.random.default_rng(8)
    count, vocab = 300, 49152
    for top_p, min_p, top_k in ((0.95, 1e-5, 0), (0.9, 0.0, 0), (0.99, 1e-4, 2000)):
        logits = (rng.standard_normal(vocab) * 1.5).astype(np.float32)
        p = cut_distribution(logits.astype(np.float64), 1.0, top_k, top_p, min_p)
        rows = sampling_rows(
            count,
            top_p=np.full(count, top_p, np.float32),
            min_p=np.full(count, min_p, np.float32),
            top_k=np.full(count, top_k, np.int32),
        )
        num_rows = jnp.array([count], jnp.int32)
        drawn = np.asarray(sample_native(jnp.tile(logits, (count, 1)), rows, num_rows))
        plain = np.asarray(sample_xla(jnp.tile(logits, (count, 1)), rows, num_rows))
        border = p[p > 0].min()
        assert (p[drawn] > 0).mean() > 0.99
        # The same uniform draws from the same cut distribution, apart from rounding in the sums.
        assert (np.abs(np.cumsum(p)[drawn] - np.cumsum(p)[plain]) < 1e-3 + border).all()


@pytest.mark.parametrize("kind", [NativeAttention, XlaAttention])
def test_what_a_former_owner_left_in_a_block_does_not_spread(kind: type[PagedAttention]) -> None:
    attention = kind(
        num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, block_size=32, window=None, dtype="float32"
    )
    runner = Runner(attention, 0, np.zeros(8, np.float32))
    spec = attention.cache_shape(2)
    cache = jnp.full(spec.shape, jnp.nan, spec.dtype)
    rng = np.random.default_rng(0)
    tables = np.array([[1, 0]], np.int32)
    for start, count in ((0, 20), (20, 1), (21, 14), (35, 1)):
        row = rng.standard_normal((count, 4, 16), np.float32)
        out, cache = runner.run(cache, [row], [start + count], tables)
        assert np.isfinite(out).all()
