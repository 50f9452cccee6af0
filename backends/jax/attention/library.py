"""Attention on TPU by the kernel that JAX ships (`attention=jax`), where its shapes allow: something to compare with.

It reads pages only, so new keys and values are scattered into them by XLA before it runs. Its pages are arrays of the
cache's own type with K and V of the heads interleaved, [blocks, block_size, 2 kv_heads, d], whose tiles HBM pads to a
power of two of heads and to 128 elements; our words (words.py) can't be read as such without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from backends.jax.attention.base import NOTHING_MORE, AttentionInputs, LayerArrays, PagedAttention
from backends.jax.rope import Rotary

VMEM_LIMIT_BYTES = 64 << 20
KV_BLOCK = 512  # tokens
QUERY_BLOCK = 32  # tokens; its own table of tuned sizes asks for a TPU at hand


@dataclass(frozen=True, kw_only=True)
class LibraryAttention(PagedAttention):
    def problem(self) -> str | None:
        combined = 2 * self.num_kv_heads
        packing = 1 if self.dtype == "float32" else 2
        words = combined // packing
        if self.is_quantized:
            return f"JAX's kernel takes one scale for all heads and layers, not {self.dtype} with scales of their own"
        if self.chunk is not None:
            return "JAX's kernel has no chunked attention; attention=pallas has"
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} query heads can't share {self.num_kv_heads} kv heads evenly"
        if self.head_dim % 128:
            return f"JAX's kernel takes heads of 128 or 256 elements, not {self.head_dim}; attention=pallas takes any"
        if words not in (1, 2, 4) and words % 8:
            return f"JAX's kernel takes 1, 2, 4 or multiples of 8 kv heads a chip, not {self.num_kv_heads}"
        if self.block_size > KV_BLOCK:
            return f"JAX's kernel fetches whole blocks: {self.block_size} tokens are too many; use block_size=32"
        return None

    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = (self.num_layers, num_blocks + 1, self.block_size, 2 * self.num_kv_heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def __call__(
        self,
        qkv: jax.Array,
        rotary: Rotary,
        cache: jax.Array,
        layer: jax.Array,
        inputs: AttentionInputs,
        extra: LayerArrays = NOTHING_MORE,
    ) -> tuple[jax.Array, jax.Array]:
        if not extra.is_empty:
            raise ValueError("JAX's kernel has no sinks, scales or windows of single layers: use PallasAttention")
        q, k, v = self._rotated(qkv, rotary)
        cache = self._write(k, v, cache, layer, inputs)
        width = inputs.block_tables.shape[1]
        out = ragged_paged_attention(
            q.astype(cache.dtype),
            cache.reshape(-1, *cache.shape[2:]),
            inputs.kv_lens,
            inputs.block_tables + layer * cache.shape[1],
            inputs.query_starts,
            inputs.num_rows,
            sm_scale=self.scale,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            num_kv_pages_per_block=min(width, max(1, KV_BLOCK // self.block_size)),
            num_queries_per_block=min(q.shape[0], QUERY_BLOCK),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
        )
        is_real = jnp.arange(q.shape[0])[:, None, None] < inputs.num_tokens
        return jnp.where(is_real, out, 0).astype(qkv.dtype), cache

    def _write(
        self, k: jax.Array, v: jax.Array, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs
    ) -> jax.Array:
        tokens = k.shape[0]
        block = inputs.block_tables[inputs.token_rows, inputs.positions // self.block_size]
        block = jnp.where(jnp.arange(tokens) < inputs.num_tokens, block, cache.shape[1] - 1)
        both = jnp.stack([k, v], axis=2).reshape(tokens, -1, self.head_dim).astype(cache.dtype)
        return cache.at[layer, block, inputs.positions % self.block_size].set(both)
