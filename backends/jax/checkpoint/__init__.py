"""Reading weights, one tensor at a time, under Hugging Face's names: safetensors, GGUF, or random ones."""

from backends.jax.checkpoint.base import Checkpoint, expected_shapes
from backends.jax.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "expected_shapes", "open_checkpoint"]
