"""Random ragged steps for attention over a paged cache, and what must come out of them in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.jax.attention import AttentionInputs, LayerArrays, PagedAttention, PallasAttention
from backends.jax.attention.base import NO_LIMIT
from backends.jax.rope import Rotary

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
LAYERS = 2
SPARE_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static shape that steps are padded to, so that many of them share one program."""

    tokens: int
    rows: int
    context: int  # tokens of the longest row

    def decoding(self) -> Shape:
        return replace(self, tokens=self.rows)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's rows, and which keys they see."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    window: int | None = None
    chunk: int | None = None
    seed: int = 0

    @property
    def decode_only(self) -> bool:
        return all(n == 1 for n in self.query_lens)


@st.composite
def steps(draw: st.DrawFn, shape: Shape) -> Step:
    """Rows of all kinds: decoding ones first, as the scheduler has them, then prompts; or prompts anywhere."""
    rows = draw(st.integers(1, shape.rows))
    if draw(st.booleans()):
        new = [1] * rows
    else:
        new = draw(st.lists(st.integers(1, shape.tokens // rows), min_size=rows, max_size=rows))
        if draw(st.booleans()):
            new = sorted(new, key=lambda n: n > 1)
    total = [draw(st.integers(n, draw(st.sampled_from([n, shape.context])))) for n in new]
    return Step(
        query_lens=tuple(new),
        kv_lens=tuple(total),
        window=draw(st.one_of(st.none(), st.integers(1, shape.context))),
        chunk=draw(st.one_of(st.none(), st.integers(1, shape.context))),
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
        stored = (np.clip(np.round(drawn), -127, 127) if spread > 1 else drawn).astype(kept)
        self.stored = np.where(stored == 0, 0, stored).astype(kept)  # rotation loses the sign of zeros


def expected_outputs(
    attention: PagedAttention, row: Row, step: Step, scales: tuple[Any, Any], sinks: Any
) -> NDArray[np.float64]:
    """[n, heads, d]: attention by its definition."""
    keys, values = (part.astype(np.float64) * s[:, None] for part, s in zip(row.stored, scales, strict=True))
    positions = np.arange(row.total - row.new, row.total)[:, None]
    key = np.arange(row.total)[None, :]
    seen = key <= positions
    if step.window:
        seen &= key > positions - step.window
    if step.chunk:
        seen &= key // step.chunk == positions // step.chunk
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

    def __init__(self, attention: PagedAttention, shape: Shape, rng: np.random.Generator) -> None:
        self.attention = attention
        size, kv_heads = attention.block_size, attention.num_kv_heads
        self.num_blocks = shape.rows * -(-shape.context // size) + SPARE_BLOCKS
        content = (LAYERS, self.num_blocks + 1, size, 2, kv_heads, attention.head_dim)
        if attention.dtype == "int8":
            self.content = rng.integers(-127, 128, content).astype(np.int8)
        else:  # what nobody owns is not a number
            self.content = np.full(content, np.nan, DTYPES[attention.dtype])

    def put(self, layer: int, table: Any, row: Row, tokens: range) -> None:
        at, size = np.arange(tokens.start, tokens.stop), self.attention.block_size
        self.content[layer, table[at // size], at % size] = row.stored[:, at].swapaxes(0, 1)

    def to_device(self) -> jax.Array:
        flat = self.content.reshape(-1, *self.content.shape[3:])
        spec = self.attention.cache_shape(self.num_blocks)
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


@cache
def program(attention: PagedAttention) -> Any:
    # Simulated kernels take longer to compile than to run.
    return jax.jit(attention.__call__, donate_argnums=2, compiler_options={"xla_backend_optimization_level": 0})


def worst_error(attention: PagedAttention, step: Step, shape: Shape, has_sinks: bool) -> float:
    """Runs a step, checks every element of the cache, and returns the largest error relative to its row's outputs."""
    rng = np.random.default_rng(step.seed)
    shape = shape.decoding() if step.decode_only else shape
    rows = [Row(rng, attention, n, m) for n, m in zip(step.query_lens, step.kv_lens, strict=True)]
    scales = np.ones((2, attention.num_kv_heads), np.float32)
    if attention.is_quantized:
        scales = 2.0 ** rng.integers(-2, 2, scales.shape) / (32 if attention.dtype == "int8" else 1)
    sinks = rng.standard_normal(attention.num_heads).astype(np.float32) if has_sinks else None
    layer = int(rng.integers(LAYERS))

    store = Store(attention, shape, rng)
    ids = rng.permutation(store.num_blocks).astype(np.int32)
    tables = np.zeros((shape.rows, -(-shape.context // attention.block_size)), np.int32)
    for index, row in enumerate(rows):
        count = -(-row.total // attention.block_size)
        tables[index, :count], ids = ids[:count], ids[count:]
        store.put(layer, tables[index], row, range(row.total - row.new))
    cache = store.to_device()
    for index, row in enumerate(rows):
        store.put(layer, tables[index], row, range(row.total - row.new, row.total))

    qkv = np.concatenate([_projected(row, scales) for row in rows])
    qkv = np.pad(qkv, ((0, shape.tokens - len(qkv)), (0, 0), (0, 0)))
    still = jnp.zeros((shape.tokens, attention.head_dim // 2), jnp.float32)
    rotary, extra = Rotary(cos=still + 1, sin=still), _extra(attention, step, scales, sinks)
    inputs = _inputs(step, tables, shape)
    found, cache = program(attention)(jnp.asarray(qkv), rotary, cache, jnp.int32(layer), inputs, extra)
    _check_cache(store, cache)
    assert np.isfinite(np.asarray(found)).all(), "padding must stay finite"
    worst, begin = 0.0, 0
    for row in rows:
        wanted = expected_outputs(attention, row, step, tuple(scales), sinks)
        error = np.abs(np.asarray(found[begin : begin + row.new], np.float64) - wanted)
        worst = max(worst, float(error.max() / np.abs(wanted).max()))
        begin += row.new
    return worst


def _extra(attention: PagedAttention, step: Step, scales: Any, sinks: Any) -> LayerArrays:
    return LayerArrays(
        window=jnp.int32(step.window or NO_LIMIT),
        chunk=jnp.int32(step.chunk or NO_LIMIT),
        sinks=None if sinks is None else jnp.asarray(sinks),
        k_scale=jnp.asarray(scales[0], jnp.float32) if attention.is_quantized else None,
        v_scale=jnp.asarray(scales[1], jnp.float32) if attention.is_quantized else None,
    )


def _projected(row: Row, scales: Any) -> Any:
    """[n, heads + 2 kv_heads, d] float32, of which the cache keeps exactly what the row has stored."""
    new = row.stored[:, row.total - row.new :].astype(np.float32) * scales[:, None, :, None].astype(np.float32)
    return np.concatenate([row.queries, *new], axis=1)


def _inputs(step: Step, tables: Any, shape: Shape) -> AttentionInputs:
    lens, tokens = step.query_lens, sum(step.query_lens)
    positions = np.concatenate([np.arange(m - n, m) for n, m in zip(lens, step.kv_lens, strict=True)])
    padding, padding_rows = (0, shape.tokens - tokens), (0, shape.rows - len(lens))
    starts = np.pad([0, *np.cumsum(lens)], padding_rows, constant_values=tokens)
    return AttentionInputs(
        positions=jnp.asarray(np.pad(positions, padding), jnp.int32),
        token_rows=jnp.asarray(np.pad(np.repeat(np.arange(len(lens)), lens), padding), jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        kv_lens=jnp.asarray(np.pad(step.kv_lens, padding_rows), jnp.int32),
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
