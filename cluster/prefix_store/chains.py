"""RecentChains: which blocks recent prompts had, how often, and which block comes before which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

REMEMBERED_BLOCKS = 65_536
POPULAR = 2
"""Prompts that make a block popular."""


@dataclass(slots=True)
class _Block:
    parent: bytes | None
    prompts: int


class RecentChains:
    """One thread notes; any thread may ask."""

    def __init__(self, remembered: int = REMEMBERED_BLOCKS) -> None:
        self._remembered = remembered
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # least recently noted first

    def note(self, block_hashes: Sequence[bytes]) -> None:
        """A prompt has these blocks."""
        blocks, parent = self._blocks, None
        for block_hash in block_hashes:
            block = blocks.get(block_hash)
            if block is None:
                blocks[block_hash] = _Block(parent, 1)
            else:
                block.prompts += 1
                blocks.move_to_end(block_hash)
            parent = block_hash
        while len(blocks) > self._remembered:
            blocks.popitem(last=False)

    def is_popular(self, block_hash: bytes) -> bool:
        block = self._blocks.get(block_hash)
        return block is not None and block.prompts >= POPULAR

    def parent(self, block_hash: bytes) -> bytes | None:
        """The block before, or None if there is none or it is not known."""
        block = self._blocks.get(block_hash)
        return None if block is None else block.parent
