"""What an engine tells about itself, so that whoever sends it requests can choose well: its load, and what it caches.

All of this is written and read on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    running: int  # requests that have a place in the batch
    waiting: int  # requests that wait for one
    queued_tokens: int  # known tokens of all these requests whose KV is not computed yet
    free_blocks: int  # that no request owns; cached ones are among them


class CacheJournal:
    """Which blocks, by their hashes, have become findable or have ceased to be since the journal was last taken."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}

    def registered(self, block_hash: bytes) -> None:
        self._changes[block_hash] = True

    def evicted(self, block_hash: bytes) -> None:
        self._changes[block_hash] = False

    def take(self) -> dict[bytes, bool]:
        """Hash -> whether the block can be found now. Begins a new page."""
        changes, self._changes = self._changes, {}
        return changes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNews:
    """What there is to tell after a step."""

    load: EngineLoad
    cache: dict[bytes, bool]  # block hash -> whether it can be found now, of those for which that has changed
