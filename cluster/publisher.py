"""Publisher: passes an engine's news on to all ingresses that have a line to it. Lives on Serve's event loop.

It keeps the set of what the engine has cached, so that a new line, or one that was full for a while, can be told all of
it at once. That also bounds what waits for a slow ingress: nothing does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from cluster import news
from cluster.frames import Row
from cluster.routing.chain import shortened
from engine.news import EngineLoad, EngineNews

REPEAT_S = 1.0
"""A busy engine's load is sent so often at least, though it is the same: readers trust old numbers less."""


class Line(Protocol):
    """What the publisher needs of a Connection."""

    def post(self, outputs: Sequence[Any], news: Sequence[Row]) -> None: ...


class Publisher:
    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._load: EngineLoad | None = None
        self._sent_at = 0.0

    def tell_all(self, line: Line) -> None:
        """Tells one line what the others have been told so far."""
        rows = [news.cache_row(self._cached)]
        if self._load is not None:
            rows.append(news.load_row(self._load))
        line.post((), rows)

    def rows(self, steps: Sequence[EngineNews]) -> list[Row]:
        """What is new since the last call, as the engine's last steps say it."""
        if not steps:
            return []
        rows = []
        now = time.monotonic()
        if steps[-1].load != self._load or now - self._sent_at >= REPEAT_S:
            self._load, self._sent_at = steps[-1].load, now
            rows.append(news.load_row(self._load))
        changes = {known_as: here for step in steps for known_as, here in step.cache.items()}
        if changes:
            rows.append(self._changes(changes))
        return rows

    def _changes(self, changes: dict[bytes, bool]) -> Row:
        added, removed = shortened(changes)
        self._cached.update(added)
        self._cached.difference_update(removed)
        return news.changes_row(added, removed)
