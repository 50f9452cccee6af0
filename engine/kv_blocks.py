"""KVBlocks: keys and values of a run of tokens, in a layout that no device and no tensor-parallel size shows.

What leaves one engine's KV cache for another's, or for host memory, takes this form: unequal block sizes are re-cut by
tokens, unequal tensor-parallel sizes by head ranges, and another kind of hardware only has to know this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


class KVLostError(RuntimeError):
    """KV that was on its way here does not come. The message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVFormat:
    """What two engines must have in common to exchange KV: the model's, not the deployment's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "int8" | "float8_e4m3fn"

    @property
    def bytes_per_token(self) -> int:
        """Of all layers and heads, keys and values."""
        size = {"float32": 4, "bfloat16": 2}.get(self.dtype, 1)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBlocks:
    """One host's share of the KV of consecutive tokens.

    `data` is contiguous, in the integer type of the dtype's width (uint32, uint16, uint8): numpy's and Ray's zero-copy
    paths know no bfloat16.
    """

    format: KVFormat
    heads: range  # which of the model's key-value heads
    data: NDArray[Any]  # [layers, 2 (key, value), heads, tokens, head_dim]

    @property
    def num_tokens(self) -> int:
        return int(self.data.shape[3])


class PendingBlocks(ABC):
    """KV that a device was told to read out, and that may still be on its way to the host."""

    @abstractmethod
    def result(self) -> Sequence[KVBlocks]:
        """Waits for the device; any thread may call it, more than once. The shares together hold every head.

        Raises:
            BackendError: the read failed.
        """


class KVPayload(ABC):
    """KV on its way into a cache. Resolved by each host of the engine for itself, so it may be references only."""

    @abstractmethod
    def shares(self) -> Sequence[KVBlocks]:
        """The KV, in shares that together hold every head that this host needs; at once, as it has arrived.

        Raises:
            KVLostError: it was lost.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPayload(KVPayload):
    """KV in this process' memory."""

    blocks: Sequence[KVBlocks]

    def shares(self) -> Sequence[KVBlocks]:
        return self.blocks
