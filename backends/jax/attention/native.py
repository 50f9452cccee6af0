"""Attention by the C++ kernel: ragged, so neither padded rows nor wide block tables cost anything."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax import native
from backends.jax.attention.base import NOTHING_MORE, AttentionInputs, LayerArrays, PagedAttention
from backends.jax.rope import Rotary


@dataclass(frozen=True, kw_only=True)
class NativeAttention(PagedAttention):
    @staticmethod
    def supports(head_dim: int, block_size: int) -> bool:
        """Heads in whole vectors, blocks in whole tiles."""
        return head_dim % 16 == 0 and (block_size in (8, 16) or block_size % 32 == 0)

    def problem(self) -> str | None:
        if not self.supports(self.head_dim, self.block_size):
            return f"the native kernel takes no head_dim={self.head_dim} with block_size={self.block_size}"
        if self.dtype not in ("float32", "bfloat16"):
            return f"the native kernel keeps no keys and values in {self.dtype}; attention=xla does"
        if self.chunk is not None or self.soft_cap is not None:
            return "the native kernel has no chunked attention and no soft cap; attention=xla does"
        return None

    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = (self.num_layers, num_blocks + 1, 2, self.num_kv_heads, self.block_size * self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if self.dtype == "float32" else jnp.uint16)

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
            raise ValueError("the native kernel has no sinks, scales or windows of single layers: use XlaAttention")
        out, cache = native.ragged_attention(
            qkv.astype(jnp.float32),
            rotary.cos,
            rotary.sin,
            cache,
            layer,
            inputs.block_tables,
            inputs.kv_lens,
            inputs.query_starts,
            inputs.num_rows,
            num_heads=self.num_heads,
            scale=self.scale,
            window=self.window or 0,
        )
        return out.astype(qkv.dtype), cache
