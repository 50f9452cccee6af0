"""History: the last changes of a directory, so that replicas that follow it are told the difference only."""

from __future__ import annotations

from collections import deque
from itertools import islice

KEPT_CHANGES = 65_536


class History:
    """Numbers every change; remembers the last ones."""

    def __init__(self, kept: int = KEPT_CHANGES) -> None:
        self.number = 0  # changes so far
        self._last: deque[tuple[bytes, bool]] = deque(maxlen=kept)

    def added(self, block_hash: bytes) -> None:
        self._note(block_hash, True)

    def removed(self, block_hash: bytes) -> None:
        self._note(block_hash, False)

    def since(self, number: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """(added, removed) after change `number`, each block as it is now; None if that is too long ago."""
        missed = self.number - number
        if number < 0 or missed < 0 or missed > len(self._last):
            return None
        state: dict[bytes, bool] = {}
        for block_hash, is_here in islice(reversed(self._last), missed):
            state.setdefault(block_hash, is_here)
        return tuple(h for h, here in state.items() if here), tuple(h for h, here in state.items() if not here)

    def _note(self, block_hash: bytes, is_here: bool) -> None:
        self.number += 1
        self._last.append((block_hash, is_here))
