"""Ragged paged attention on TPU by a Pallas kernel of our own."""

from backends.jax.attention.pallas.attention import PallasAttention

__all__ = ["PallasAttention"]
