"""Suspects: replicas that have just failed this ingress, which takes them for its requests only if there is no other.

Serve hears of a replica's death with its next health check, seconds later, and of a hang much later. Until then its
router would name the replica again, to each of the streams that were just cut off. One that has a line is forgiven
after a while. One that has none is not before it has opened one, which engines are asked for every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

SUSPICION_S = 6.0
"""A little longer than Serve's health check period."""
MEMORY_S = 600.0
"""A replica that has not come back by then is gone for good: its name does not return."""


class Suspects(Collection[str]):
    """The replicas' names, at any time those that are suspects now. Read from several threads, written from one."""

    def __init__(self, has_line: Callable[[str], bool]) -> None:
        self._has_line = has_line
        self._since: dict[str, float] = {}

    def add(self, replica: str) -> None:
        now = time.monotonic()
        self._since = {**{name: since for name, since in self._since.items() if now - since < MEMORY_S}, replica: now}

    def clear(self, replica: str) -> None:
        """It works."""
        if replica in self._since:
            self._since = {name: since for name, since in self._since.items() if name != replica}

    def __contains__(self, replica: object) -> bool:
        if not isinstance(replica, str):
            return False
        since = self._since.get(replica)
        return since is not None and (time.monotonic() - since < SUSPICION_S or not self._has_line(replica))

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._since if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)
