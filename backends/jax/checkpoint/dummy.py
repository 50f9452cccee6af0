"""Random weights from the config alone, for tests, sizing and compile-only runs."""

from __future__ import annotations

import math
import zlib

import ml_dtypes
import numpy as np

from backends.jax.checkpoint.base import Checkpoint, Tensor
from backends.jax.model_config import ModelConfig

_STD = 0.02
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
        values: Tensor = generator.standard_normal(shape, np.float32) * np.float32(_STD)
        return values.astype(ml_dtypes.bfloat16)
