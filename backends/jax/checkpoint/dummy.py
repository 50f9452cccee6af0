"""Random weights from the config alone, for tests, sizing and compile-only runs."""

from __future__ import annotations

import math
import zlib

import ml_dtypes
import numpy as np

from backends.jax.checkpoint.base import Checkpoint, Tensor
from backends.jax.model_config import ModelConfig

_SIGN_AND_MANTISSA = np.uint16(0x807F)
_EXPONENT = np.uint16((127 - 6) << 7)
"""Of bfloat16; magnitudes are from 2^-6 to 2^-5, so the standard deviation is 0.024."""
_ITEM_BYTES = 2


class DummyCheckpoint(Checkpoint):
    """Deterministic bfloat16 values: each tensor depends on the seed and its own name only."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__(config, "dummy weights")
        self._seed = seed

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes(name) for name in self.names())

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * _ITEM_BYTES

    def _read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, ml_dtypes.bfloat16)
        generator = np.random.Generator(np.random.PCG64([self._seed, zlib.crc32(name.encode())]))
        bits = generator.integers(
            0, 1 << 16, shape, np.uint16
        )  # made of bits, since 7 billion normal values take minutes
        return (bits & _SIGN_AND_MANTISSA | _EXPONENT).view(ml_dtypes.bfloat16)
