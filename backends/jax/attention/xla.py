"""Attention in plain XLA: gathers each row's blocks. Runs anywhere; the fallback where no kernel fits.

A decode step (one token a row) is one batched product over padded contexts. A step with prompts goes through query
tiles of one row each in a loop, so that its cost follows the tokens and not rows times the longest prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax.attention.base import (
    NOTHING_MORE,
    AttentionInputs,
    LayerArrays,
    PagedAttention,
    quantized,
)
from backends.jax.rope import Rotary

QUERY_TILE = 32  # tokens
STORED_AS = {
    "float32": jnp.float32,
    "bfloat16": jnp.uint16,
    "int8": jnp.int8,
    "float8_e4m3fn": jnp.uint8,
}


@dataclass(frozen=True, kw_only=True)
class XlaAttention(PagedAttention):
    pads_tables: bool = True

    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = (self.num_layers, num_blocks + 1, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return jax.ShapeDtypeStruct(shape, STORED_AS[self.dtype])

    def __call__(
        self,
        qkv: jax.Array,
        rotary: Rotary,
        cache: jax.Array,
        layer: jax.Array,
        inputs: AttentionInputs,
        extra: LayerArrays = NOTHING_MORE,
    ) -> tuple[jax.Array, jax.Array]:
        q, k, v = self._rotated(qkv, rotary)
        k, v = quantized(k, extra.k_scale, self.dtype), quantized(v, extra.v_scale, self.dtype)
        cache = self._write(k, v, cache, layer, inputs)
        grouped = (q * self.scale).reshape(q.shape[0], self.num_kv_heads, -1, self.head_dim)
        if extra.k_scale is not None:
            grouped = grouped * extra.k_scale[:, None, None]
        attend = self._decode if inputs.decode_only else self._tiles
        out = attend(grouped, cache, layer, inputs, extra)
        if extra.v_scale is not None:
            out = out * extra.v_scale[:, None, None]
        # Padding has read what it does not own, which may be anything.
        is_real = jnp.arange(q.shape[0])[:, None, None] < inputs.num_tokens
        return jnp.where(is_real, out.reshape(q.shape), 0).astype(qkv.dtype), cache

    def _write(
        self, k: jax.Array, v: jax.Array, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs
    ) -> jax.Array:
        tokens = k.shape[0]
        dump = cache.shape[1] - 1
        block = inputs.block_tables[inputs.token_rows, inputs.positions // self.block_size]
        block = jnp.where(jnp.arange(tokens) < inputs.num_tokens, block, dump)
        offset = inputs.positions % self.block_size
        both = jax.lax.bitcast_convert_type(jnp.stack([k, v], axis=1), cache.dtype)  # [T, 2, kv_heads, d]
        return cache.at[layer, block, :, :, offset, :].set(both)

    def _gather(self, cache: jax.Array, layer: jax.Array, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of tables [..., B], each [..., kv_heads, B * block_size, d], in a type to multiply with."""
        blocks = jax.lax.bitcast_convert_type(cache[layer, tables], jnp.dtype(self.dtype))
        if self.is_quantized:
            blocks = blocks.astype(jnp.bfloat16)  # exact
        both = jnp.moveaxis(blocks, (-4, -3), (0, -4))  # [2, ..., kv_heads, B, block_size, d]
        both = both.reshape(*both.shape[:-3], -1, self.head_dim)
        return both[0], both[1]

    def _visible(self, positions: jax.Array, length: int, extra: LayerArrays) -> jax.Array:
        """[..., length]: which keys a query at each of positions [...] sees."""
        keys, position = jnp.arange(length), positions[..., None]
        seen = keys <= position
        if self.window is not None or extra.window is not None:
            seen &= keys > position - self.window_of(extra)
        if self.chunk is not None or extra.chunk is not None:
            seen &= keys // self.chunk_of(extra) == position // self.chunk_of(extra)
        return seen

    def _attend(self, q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, sinks: jax.Array) -> jax.Array:
        """q [..., h, n, d], keys and values [..., h, m, d], seen [..., n, m], sinks [h, n] -> [..., h, n, d]."""
        # What a former owner left in a block is multiplied with weight 0, which a NaN survives.
        values = jnp.where(jnp.any(seen, axis=-2)[..., None, :, None], values, 0)
        product = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("...hnd,...hmd->...hnm", q.astype(keys.dtype), keys, **product)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        scores = jnp.where(seen[..., None, :, :], scores, -jnp.inf)
        largest = jnp.maximum(scores.max(axis=-1), sinks)[..., None]
        weights = jnp.exp(scores - largest)
        probabilities = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks[..., None] - largest))
        return jnp.einsum("...hnm,...hmd->...hnd", probabilities.astype(values.dtype), values, **product)

    def _sinks(self, extra: LayerArrays, tokens: int) -> jax.Array:
        """[kv_heads, tokens * group]"""
        sinks = jnp.full(self.num_heads, -jnp.inf) if extra.sinks is None else extra.sinks
        return jnp.tile(sinks.reshape(self.num_kv_heads, -1), (1, tokens))

    def _decode(
        self, q: jax.Array, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs, extra: LayerArrays
    ) -> jax.Array:
        keys, values = self._gather(cache, layer, inputs.block_tables)  # [R, h, m, d]
        seen = self._visible(inputs.positions, keys.shape[-2], extra)[:, None, :]
        seen = jnp.broadcast_to(seen, (q.shape[0], q.shape[2], keys.shape[-2]))
        return self._attend(q, keys, values, seen, self._sinks(extra, 1))

    def _tiles(
        self, q: jax.Array, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs, extra: LayerArrays
    ) -> jax.Array:
        tokens, kv_heads, group, d = q.shape
        padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
        tiles_of_row = -(-jnp.diff(inputs.query_starts) // QUERY_TILE)
        ends = jnp.cumsum(tiles_of_row)
        sinks = self._sinks(extra, QUERY_TILE)

        def one_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
            row = jnp.searchsorted(ends, tile, side="right")
            in_row = tile - (ends[row] - tiles_of_row[row])
            start = inputs.query_starts[row] + in_row * QUERY_TILE
            first = inputs.kv_lens[row] - (inputs.query_starts[row + 1] - start)  # position of the tile's first token
            queries = jax.lax.dynamic_slice_in_dim(padded, start, QUERY_TILE).transpose(1, 0, 2, 3)
            keys, values = self._gather(cache, layer, inputs.block_tables[row])  # [h, m, d]
            # Queries behind the row's end are padding: they see what its last one sees.
            positions = jnp.minimum(first + jnp.repeat(jnp.arange(QUERY_TILE), group), inputs.kv_lens[row] - 1)
            seen = self._visible(positions, keys.shape[-2], extra)
            result = self._attend(queries.reshape(kv_heads, -1, d), keys, values, seen, sinks)
            result = result.reshape(kv_heads, QUERY_TILE, group, d).transpose(1, 0, 2, 3)
            # What this writes behind its row's end, the next row's tile overwrites.
            return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

        out = jax.lax.fori_loop(0, ends[-1], one_tile, jnp.zeros_like(padded))
        kept: jax.Array = out[:tokens]
        return kept
