"""Attention by the C++ kernel: ragged, so neither padded rows nor wide block tables cost anything."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax import native
from backends.jax.attention.base import AttentionInputs, PagedAttention
from backends.jax.rope import Rotary


@dataclass(frozen=True, kw_only=True)
class NativeAttention(PagedAttention):
    @staticmethod
    def supports(head_dim: int, block_size: int) -> bool:
        """Heads in whole vectors, blocks in whole tiles."""
        return head_dim % 16 == 0 and (block_size in (8, 16) or block_size % 32 == 0)

    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = (self.num_layers, num_blocks + 1, 2, self.num_kv_heads, self.block_size * self.head_dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if self.dtype == "float32" else jnp.uint16)

    def __call__(
        self, qkv: jax.Array, rotary: Rotary, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, jax.Array]:
        return native.ragged_attention(
            qkv,
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
