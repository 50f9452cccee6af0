"""Partition: which part of each tensor a chip holds. Every part is a contiguous range and zeros behind it.

All chips hold parts of the same size, so that they run one program; what doesn't divide is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.jax.heads import HeadLayout
from backends.jax.model_config import ModelConfig
from backends.jax.sharding import Axes

TPU_LANES = 128
MAX_PADDING = 0.02
"""Share of a size up to which padding it to whole TPU lanes is worth the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """How a model is cut over chips, by logical axis."""

    model: ModelConfig
    chips: int
    lanes: int  # sizes are rounded up to multiples of this where it costs little

    @property
    def heads(self) -> HeadLayout:
        return HeadLayout(num_heads=self.model.num_heads, num_kv_heads=self.model.num_kv_heads, chips=self.chips)

    @property
    def vocab_per_chip(self) -> int:
        return self._even(self.model.vocab_size)

    @property
    def mlp_per_chip(self) -> int:
        size = self._even(self.model.intermediate_size)
        return size + size % 2  # also where nothing else is rounded up

    def local_size(self, axis: str) -> int:
        """Length of a logical axis on each chip, padding included."""
        sizes = {
            "hidden": self.model.hidden_size,
            "q_heads": self.heads.heads_per_chip * self.model.head_dim,
            "kv_heads": self.heads.kv_heads_per_chip * self.model.head_dim,
            "mlp": self.mlp_per_chip,
            "vocab": self.vocab_per_chip,
        }
        return sizes[axis]

    def share(self, axis: str, chip: int) -> range:
        """Which indices of a logical axis a chip holds; it may be shorter than local_size, even empty."""
        if axis == "hidden":
            return range(self.model.hidden_size)
        if axis in ("q_heads", "kv_heads"):
            heads = self.heads.heads(chip) if axis == "q_heads" else self.heads.kv_heads(chip)
            return range(heads.start * self.model.head_dim, heads.stop * self.model.head_dim)
        total = self.model.vocab_size if axis == "vocab" else self.model.intermediate_size
        size = self.local_size(axis)
        return range(min(chip * size, total), min((chip + 1) * size, total))

    def cut(self, array: NDArray[Any], axes: Axes, chip: int) -> NDArray[Any]:
        """A chip's part of an array whose dimensions are these logical axes; a view where nothing is padded."""
        shares = [self.share(axis, chip) if axis else range(size) for axis, size in zip(axes, array.shape, strict=True)]
        part: NDArray[Any] = array[tuple(slice(share.start, share.stop) for share in shares)]
        missing = [
            (0, self.local_size(axis) - len(share)) if axis else (0, 0)
            for axis, share in zip(axes, shares, strict=True)
        ]
        return np.pad(part, missing) if any(after for _, after in missing) else part

    def _even(self, total: int) -> int:
        size = -(-total // self.chips)
        padded = -(-size // self.lanes) * self.lanes
        # Pairs always: the packed bfloat16 weights of the CPU kernels interleave two inputs.
        return padded if padded - size <= MAX_PADDING * size else -(-size // 2) * 2
