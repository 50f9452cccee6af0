"""Attention over paged KV blocks behind one interface: XLA anywhere, native kernels on CPU, Pallas kernels on TPU."""

from backends.jax.attention.base import AttentionInputs, LayerArrays, PagedAttention
from backends.jax.attention.library import LibraryAttention
from backends.jax.attention.native import NativeAttention
from backends.jax.attention.pallas import PallasAttention
from backends.jax.attention.xla import XlaAttention

__all__ = [
    "AttentionInputs",
    "LayerArrays",
    "LibraryAttention",
    "NativeAttention",
    "PagedAttention",
    "PallasAttention",
    "XlaAttention",
]
