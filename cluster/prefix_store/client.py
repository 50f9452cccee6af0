"""StoreClient: what a replica asks of the prefix store. Every call may wait, with a deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.prefix_store.messages import Changes, Offer, Run, Version
from engine.kv_blocks import KVBlocks, KVPayload


class StoreError(RuntimeError):
    """The store has not done what was asked: it is gone, full or slow. One line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSegment:
    """Blocks that are to be stored as one object."""

    space: bytes
    block_hashes: Sequence[bytes]
    parent: bytes | None  # the block before the first one, if known
    shares: Sequence[KVBlocks]  # contiguous arrays with all heads of all these blocks

    @property
    def num_bytes(self) -> int:
        return sum(share.data.nbytes for share in self.shares)

    def offer(self, node: str) -> Offer:
        """What the store is told of it."""
        return Offer(
            space=self.space,
            block_hashes=tuple(self.block_hashes),
            parent=self.parent,
            num_bytes=self.num_bytes,
            node=node,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A run of blocks, and whatever the client needs to read the segment that holds it."""

    run: Run
    content: Any


class StoreClient(ABC):
    """Methods may be called from several threads.

    Raises:
        StoreError: all methods but `close`.
    """

    @abstractmethod
    def join(self, timeout_s: float) -> None:
        """Finds the application's store, or makes one."""

    @abstractmethod
    def changes(self, space: bytes, since: Version, timeout_s: float) -> Changes:
        """What the directory has that `since` had not. Returns after some seconds if nothing changes."""

    @abstractmethod
    def add(self, segment: NewSegment, timeout_s: float) -> bool:
        """Hands over blocks. Returns when the store owns them; False if it has them already, or no room for them."""

    @abstractmethod
    def find(self, space: bytes, block_hashes: Sequence[bytes], timeout_s: float) -> Sequence[Found]:
        """The longest beginning of `block_hashes` that is all in the store."""

    @abstractmethod
    def payload(self, found: Found) -> KVPayload:
        """The whole segment that holds a run, for whoever fetches it, without copying what is on that node."""

    @abstractmethod
    def lost(self, found: Found) -> None:
        """Tells the store that a segment can't be read. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the store."""
