"""PagedAttention: the interface that attention implementations share, and the arrays a step gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import jax

from backends.jax.rope import Rotary


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Where the step's T tokens and R rows are (padded); the same for every layer."""

    positions: jax.Array  # [T] int32
    token_rows: jax.Array  # [T] int32, the row of each token
    query_starts: jax.Array  # [R + 1] int32, first token of each row; num_tokens for padding rows
    kv_lens: jax.Array  # [R] int32, with this step's tokens
    block_tables: jax.Array  # [R, B] int32
    num_rows: jax.Array  # [1] int32
    num_tokens: jax.Array  # [1] int32
    decode_only: bool = field(metadata={"static": True})  # one token a row: token i is row i's


@dataclass(frozen=True, kw_only=True)
class PagedAttention(ABC):
    """Attention of a decoder's layers over one KV cache. The block behind the last is a dump for padding."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None  # tokens seen, the query's own included; None = all
    dtype: str  # "float32" | "bfloat16", of keys and values

    pads_tables: bool = False
    """Whether the work grows with the width of the block tables, so that their width needs buckets."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def bytes_per_block(self) -> int:
        item = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * item

    @abstractmethod
    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """The cache of num_blocks blocks and the dump block. bfloat16 is kept as uint16: XLA's CPU scatter
        into a bfloat16 array rewrites the whole array through float32."""

    @abstractmethod
    def __call__(
        self, qkv: jax.Array, rotary: Rotary, cache: jax.Array, layer: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys, stores keys and values in their blocks, and attends.

        Args:
            qkv: [T, heads + 2 kv_heads, d] float32: query, key and value heads, not rotated yet.

        Returns:
            The heads' outputs [T, heads, d] float32 (padding rows hold anything finite), and the updated cache.
        """
