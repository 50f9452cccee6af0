"""HeadLayout: which query and key-value heads each chip of a tensor-parallel group holds.

Any head counts can be split. Where there are more chips than key-value heads, several chips hold a copy of the same one
and share its query heads; where heads don't divide, the last chips hold zero heads, which add nothing to the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend import BackendError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    num_heads: int
    num_kv_heads: int
    chips: int

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def chips_per_kv_head(self) -> int:
        """How many chips hold a copy of each key-value head."""
        return max(1, self.chips // self.num_kv_heads)

    @property
    def kv_heads_per_chip(self) -> int:
        """Heads of each chip's KV cache, zero ones included."""
        return -(-self.num_kv_heads // self.chips)

    @property
    def heads_per_chip(self) -> int:
        """Query heads of each chip, zero ones included; a multiple of kv_heads_per_chip."""
        return self.kv_heads_per_chip * -(-self.group // self.chips_per_kv_head)

    def kv_heads(self, chip: int) -> range:
        """The model's key-value heads on this chip."""
        first = chip // self.chips_per_kv_head * self.kv_heads_per_chip
        return _within(first, first + self.kv_heads_per_chip, self.num_kv_heads)

    def heads(self, chip: int) -> range:
        """The model's query heads on this chip; they all belong to its key-value heads."""
        kv_heads = self.kv_heads(chip)
        if self.chips_per_kv_head == 1:
            return range(kv_heads.start * self.group, kv_heads.stop * self.group)
        first = kv_heads.start * self.group + chip % self.chips_per_kv_head * self.heads_per_chip
        return _within(first, first + self.heads_per_chip, kv_heads.stop * self.group)


def check_heads(num_heads: int, chips: int) -> None:
    """Refuses to split so far that some chips would hold padding only, whatever the key-value heads are.

    Raises:
        BackendError: there are more chips than query heads.
    """
    if chips > num_heads:
        raise BackendError(
            f"tensor_parallel_size={chips} is more than the model's {num_heads} query heads, which can't be split; "
            f"any tensor_parallel_size from 1 to {num_heads} works"
        )


def _within(start: int, stop: int, end: int) -> range:
    return range(min(start, end), min(stop, end))
