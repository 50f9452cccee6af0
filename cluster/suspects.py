"""Suspects: replicas that have just failed this ingress, which takes them for its requests only if there is no other.

Serve hears of a replica's death with its next health check, seconds later. Until then its router would name the dead
one again, to each of the streams that were just cut off.
"""

from __future__ import annotations

import time

SUSPICION_S = 6.0
"""A little longer than Serve's health check period: by then Serve knows, or the replica is good again."""


class Suspects:
    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, replica: str) -> None:
        self._until[replica] = time.monotonic() + SUSPICION_S

    def clear(self, replica: str) -> None:
        """It works."""
        self._until.pop(replica, None)

    def current(self) -> frozenset[str]:
        if not self._until:
            return frozenset()
        now = time.monotonic()
        self._until = {replica: until for replica, until in self._until.items() if until > now}
        return frozenset(self._until)
