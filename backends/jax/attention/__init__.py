"""Attention over paged KV blocks behind one interface: XLA anywhere, native kernels on CPU."""

from backends.jax.attention.base import AttentionInputs, PagedAttention
from backends.jax.attention.native import NativeAttention
from backends.jax.attention.xla import XlaAttention

__all__ = ["AttentionInputs", "NativeAttention", "PagedAttention", "XlaAttention"]
