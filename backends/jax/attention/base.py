"""PagedAttention: the interface that attention implementations share, and the arrays a step gives them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields

import jax
import jax.numpy as jnp

from backends.jax.rope import Rotary

NO_LIMIT = 1 << 30
"""A window or chunk that no context reaches."""


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerArrays:
    """What a layer adds to attention; None where the family has no such thing, or the same in all layers."""

    window: jax.Array | None = None  # [] int32, this layer's instead of PagedAttention.window; NO_LIMIT = all
    chunk: jax.Array | None = None  # [] int32, this layer's instead of PagedAttention.chunk; NO_LIMIT = all
    sinks: jax.Array | None = None  # [heads] float32: a logit that joins the softmax's denominator (gpt-oss)
    k_scale: jax.Array | None = None  # [kv_heads] float32: a stored key times it is the key
    v_scale: jax.Array | None = None  # [kv_heads] float32

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, each.name) is None for each in fields(self))


NOTHING_MORE = LayerArrays()


@dataclass(frozen=True, kw_only=True)
class PagedAttention(ABC):
    """Attention of a decoder's layers over one KV cache. The block behind the last is a dump for padding."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None  # tokens seen, the query's own included; None = all
    dtype: str  # "float32" | "bfloat16" | "int8" | "float8_e4m3fn", of keys and values
    chunk: int | None = None  # a query sees keys of its own chunk of this many positions only (Llama 4); None = all
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap) (Gemma 2)
    softmax_scale: float | None = None  # None = head_dim ** -0.5

    pads_tables: bool = False
    """Whether the work grows with the width of the block tables, so that their width needs buckets."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def is_quantized(self) -> bool:
        return self.dtype in ("int8", "float8_e4m3fn")

    @property
    def bytes_per_block(self) -> int:
        """What a block takes on the device, all layers together, with what the layout pads."""
        cache = self.cache_shape(0)  # the dump block
        elements: int = math.prod(cache.shape)
        return elements * int(cache.dtype.itemsize)

    def problem(self) -> str | None:
        """Why this implementation can't be used for these shapes, in one line; None when it can."""
        return None

    def window_of(self, extra: LayerArrays) -> jax.Array | int:
        """The layer's window; NO_LIMIT where there is none."""
        return extra.window if extra.window is not None else self.window or NO_LIMIT

    def chunk_of(self, extra: LayerArrays) -> jax.Array | int:
        return extra.chunk if extra.chunk is not None else self.chunk or NO_LIMIT

    @abstractmethod
    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """The cache of num_blocks blocks and the dump block. bfloat16 is kept as uint16 or packed in uint32: XLA's
        CPU scatter into a bfloat16 array rewrites the whole array through float32."""

    @abstractmethod
    def __call__(
        self,
        qkv: jax.Array,
        rotary: Rotary,
        cache: jax.Array,
        layer: jax.Array,
        inputs: AttentionInputs,
        extra: LayerArrays = NOTHING_MORE,
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys, stores keys and values in their blocks, and attends.

        A row reads blocks that other rows share with it, but no block that another row writes in the same step.

        Args:
            qkv: [T, heads + 2 kv_heads, d] float32 or bfloat16: query, key and value heads, not rotated yet.

        Returns:
            The heads' outputs [T, heads, d] like qkv (padding rows hold anything finite), and the updated cache.
        """

    def _rotated(self, qkv: jax.Array, rotary: Rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, heads, d], keys and values [T, kv_heads, d], float32."""
        parts = jnp.split(qkv.astype(jnp.float32), (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        return rotary.rotate(parts[0]), rotary.rotate(parts[1]), parts[2]


def quantized(x: jax.Array, scale: jax.Array | None, dtype: str) -> jax.Array:
    """x [T, kv_heads, d] as the cache keeps it; scale [kv_heads] is for int8 and fp8 (None = 1)."""
    if dtype not in ("int8", "float8_e4m3fn"):
        return x.astype(dtype)
    if scale is not None:
        x = x / scale[:, None]
    if dtype == "int8":
        return jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8)
    return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn)
