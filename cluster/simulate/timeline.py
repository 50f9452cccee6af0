"""Timeline: virtual time, and what is to happen in it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

START = 1.0
"""Seconds. Not 0, which is how the engine writes that something has not happened yet."""


class Timeline:
    """Runs actions in the order of their times; those of one time in the order in which they were planned.

    Called, it is a clock, as the engine and the routers take one.
    """

    def __init__(self) -> None:
        self.now = START
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plans an action; one that should have happened already happens now."""
        heapq.heappush(self._planned, (max(time, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Goes on until nothing is planned any more, or something that has happened made it all over."""
        planned = self._planned
        while planned and not is_over():
            self.now, _, action = heapq.heappop(planned)
            action()
