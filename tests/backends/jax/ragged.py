"""Random ragged steps for attention over a paged cache, and what must come out of them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.jax.attention import AttentionInputs, LayerArrays, PagedAttention, PallasAttention
from backends.jax.rope import Rotary

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 1e-2, "float8_e4m3fn": 1e-2}
"""Of a row's largest output. Apart from float32, weights and queries are rounded to bfloat16 (2^-9)."""
LAYERS = 2
SPARE_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's rows, and what attention is asked to do with them."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    sinks: bool = False
    scales: bool = False
    padding_tokens: int = 0
    padding_rows: int = 0
    seed: int = 0

    @property
    def decode_only(self) -> bool:
        return all(n == 1 for n in self.query_lens) and self.padding_tokens == self.padding_rows


@st.composite
def steps(draw: st.DrawFn, max_tokens: int = 24, max_context: int = 80) -> Step:
    """Rows of all kinds: decoding ones first, as the scheduler has them, then prompts, or all of them mixed."""
    decoding = draw(st.integers(0, 4))
    prompts = draw(st.lists(st.integers(1, max_tokens), min_size=0 if decoding else 1, max_size=3))
    new = [1] * decoding + prompts
    if draw(st.booleans()):
        new = draw(st.permutations(new))
    old = [draw(st.one_of(st.just(0), st.integers(0, max_context))) for _ in new]
    padding_rows = draw(st.integers(0, 2))
    return Step(
        query_lens=tuple(new),
        kv_lens=tuple(a + b for a, b in zip(new, old, strict=True)),
        sinks=draw(st.booleans()),
        scales=draw(st.booleans()),
        padding_rows=padding_rows,
        padding_tokens=padding_rows if not prompts else draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**31)),
    )


class Row:
    """One row's tokens: queries [n, heads, d], keys and values [m, kv_heads, d] as the cache holds them (float64)."""

    def __init__(self, rng: np.random.Generator, attention: PagedAttention, new: int, total: int) -> None:
        dim, kv_heads = attention.head_dim, attention.num_kv_heads
        self.new, self.total = new, total
        self.queries = rng.standard_normal((new, attention.num_heads, dim)).astype(np.float32)
        kept = DTYPES[attention.dtype]
        spread = 30 if attention.dtype == "int8" else 1
        drawn = rng.standard_normal((2, total, kv_heads, dim)) * spread
        self.stored = (np.clip(np.round(drawn), -127, 127) if spread > 1 else drawn).astype(kept)


def expected_outputs(
    attention: PagedAttention, row: Row, k_scale: Any, v_scale: Any, sinks: Any
) -> NDArray[np.float64]:
    """[n, heads, d]: attention by its definition."""
    keys, values = row.stored.astype(np.float64)
    keys, values = keys * k_scale[:, None], values * v_scale[:, None]
    positions = np.arange(row.total - row.new, row.total)[:, None]
    key = np.arange(row.total)[None, :]
    seen = key <= positions
    if attention.window:
        seen &= key > positions - attention.window
    if attention.chunk:
        seen &= key // attention.chunk == positions // attention.chunk
    out = np.zeros(row.queries.shape, np.float64)
    for head in range(attention.num_heads):
        shared = head * attention.num_kv_heads // attention.num_heads
        scores = row.queries[:, head].astype(np.float64) @ keys[:, shared].T * attention.scale
        if attention.soft_cap:
            scores = attention.soft_cap * np.tanh(scores / attention.soft_cap)
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum(axis=1) + (0 if sinks is None else np.exp(float(sinks[head])))
        out[:, head] = weights @ values[:, shared] / total[:, None]
    return out


class Store:
    """A cache of one implementation, filled and read as numpy: [layers, blocks + 1, block_size, 2, kv_heads, d]."""

    def __init__(self, attention: PagedAttention, num_blocks: int, rng: np.random.Generator) -> None:
        self.attention = attention
        shape = (LAYERS, num_blocks + 1, attention.block_size, 2, attention.num_kv_heads, attention.head_dim)
        if attention.dtype == "int8":
            self.content = rng.integers(-127, 128, shape).astype(np.int8)
        else:  # what nobody owns is not a number
            self.content = np.full(shape, np.nan, DTYPES[attention.dtype])

    def put(self, layer: int, table: Any, positions: Any, stored: Any) -> None:
        size = self.attention.block_size
        self.content[layer, table[positions // size], positions % size] = stored.swapaxes(0, 1)

    def to_device(self) -> jax.Array:
        flat = self.content.reshape(-1, *self.content.shape[3:])
        spec = self.attention.cache_shape(self.content.shape[1] - 1)
        if isinstance(self.attention, PallasAttention):
            words = self.attention.layout.pack(jnp.asarray(flat[:, 0]), jnp.asarray(flat[:, 1]))
            return jnp.asarray(words.reshape(spec.shape))
        moved = np.ascontiguousarray(self.content.transpose(0, 1, 3, 4, 2, 5))
        return jnp.asarray(moved.view(spec.dtype))

    def of_device(self, cache: jax.Array) -> Any:
        if isinstance(self.attention, PallasAttention):
            both = self.attention.layout.unpack(cache)
            return np.stack([np.asarray(part) for part in both], axis=3)
        moved: Any = np.asarray(cache).view(self.content.dtype).transpose(0, 1, 4, 2, 3, 5)
        return moved


def worst_error(attention: PagedAttention, step: Step) -> float:
    """Runs a step, checks every element of the cache, and returns the largest error relative to its row's outputs."""
    rng = np.random.default_rng(step.seed)
    rows = [Row(rng, attention, n, m) for n, m in zip(step.query_lens, step.kv_lens, strict=True)]
    k_scale, v_scale = np.ones((2, attention.num_kv_heads), np.float32)
    if attention.is_quantized and step.scales:
        k_scale, v_scale = 2.0 ** rng.integers(-6, 2, (2, attention.num_kv_heads))
    if attention.dtype == "int8":
        k_scale, v_scale = k_scale / 32, v_scale / 32
    sinks = rng.standard_normal(attention.num_heads).astype(np.float32) if step.sinks else None
    layer = int(rng.integers(LAYERS))

    blocks = [-(-row.total // attention.block_size) for row in rows]
    ids = rng.permutation(sum(blocks) + SPARE_BLOCKS).astype(np.int32)
    tables = np.zeros((len(rows) + step.padding_rows, max(blocks)), np.int32)
    store = Store(attention, len(ids), rng)
    for index, (row, count) in enumerate(zip(rows, blocks, strict=True)):
        tables[index, :count], ids = ids[:count], ids[count:]
        old = np.arange(row.total - row.new)
        store.put(layer, tables[index], old, row.stored[:, : len(old)])
    cache = store.to_device()
    for index, row in enumerate(rows):
        new = np.arange(row.total - row.new, row.total)
        store.put(layer, tables[index], new, row.stored[:, row.total - row.new :])

    qkv = np.concatenate([_projected(row, k_scale, v_scale) for row in rows])
    qkv = np.pad(qkv, ((0, step.padding_tokens), (0, 0), (0, 0)))
    extra = LayerArrays(
        sinks=None if sinks is None else jnp.asarray(sinks),
        k_scale=jnp.asarray(k_scale, jnp.float32) if attention.is_quantized else None,
        v_scale=jnp.asarray(v_scale, jnp.float32) if attention.is_quantized else None,
    )
    still = jnp.zeros((qkv.shape[0], attention.head_dim // 2), jnp.float32)
    run = jax.jit(attention.__call__, donate_argnums=2)
    rotary = Rotary(cos=still + 1, sin=still)
    found, cache = run(jnp.asarray(qkv), rotary, cache, jnp.int32(layer), _inputs(step, tables), extra)
    _check_cache(store, cache)
    assert np.isfinite(np.asarray(found)).all(), "padding must stay finite"
    worst, begin = 0.0, 0
    for row in rows:
        wanted = expected_outputs(attention, row, k_scale, v_scale, sinks)
        error = np.abs(np.asarray(found[begin : begin + row.new], np.float64) - wanted)
        worst = max(worst, float(error.max() / np.abs(wanted).max()))
        begin += row.new
    return worst


def _projected(row: Row, k_scale: Any, v_scale: Any) -> Any:
    """[n, heads + 2 kv_heads, d] float32, of which the cache keeps exactly what the row has stored."""
    new = row.stored[:, row.total - row.new :].astype(np.float32)
    keys, values = new[0] * k_scale[:, None].astype(np.float32), new[1] * v_scale[:, None].astype(np.float32)
    return np.concatenate([row.queries, keys, values], axis=1)


def _inputs(step: Step, tables: Any) -> AttentionInputs:
    lens, tokens = step.query_lens, sum(step.query_lens)
    positions = np.concatenate([np.arange(m - n, m) for n, m in zip(lens, step.kv_lens, strict=True)])
    starts = [0, *np.cumsum(lens), *[tokens] * step.padding_rows]
    token_rows = np.repeat(np.arange(len(lens)), lens)
    return AttentionInputs(
        positions=jnp.asarray(np.pad(positions, (0, step.padding_tokens)), jnp.int32),
        token_rows=jnp.asarray(np.pad(token_rows, (0, step.padding_tokens)), jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        kv_lens=jnp.asarray(np.pad(step.kv_lens, (0, step.padding_rows)), jnp.int32),
        block_tables=jnp.asarray(tables),
        num_rows=jnp.array([len(lens)], jnp.int32),
        num_tokens=jnp.array([tokens], jnp.int32),
        decode_only=step.decode_only,
    )


def _check_cache(store: Store, cache: jax.Array) -> None:
    """Bit for bit what it was, with the new tokens in their places; the dump block may hold anything."""
    found, wanted = store.of_device(cache)[:, :-1], store.content[:, :-1]
    bits = f"u{wanted.dtype.itemsize}"
    different = (found.view(bits) != wanted.view(bits)).any(axis=(-1, -2, -3))
    assert not different.any(), f"differs at (layer, block, token): {np.argwhere(different)[:5].tolist()}"
