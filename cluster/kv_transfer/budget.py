"""ByteBudget: bounds the bytes that are under way. Who finds no room waits in line."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class ByteBudget:
    """Use it from one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    async def take(self, num_bytes: int) -> int:
        """Waits for room, first come first served. Returns what `give_back` must be called with.

        What is larger than the whole budget gets all of it, alone.
        """
        share = min(num_bytes, self._limit)
        if not self._waiting and self._taken + share <= self._limit:
            self._taken += share
            return share
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given room at the same moment
                self.give_back(share)
            else:
                with contextlib.suppress(ValueError):  # it was passed over at the same moment
                    self._waiting.remove((share, turn))
                self._admit()
            raise
        return share

    def give_back(self, share: int) -> None:
        self._taken -= share
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken + self._waiting[0][0] <= self._limit:
            share, turn = self._waiting.popleft()
            if not turn.cancelled():  # its task runs only after this
                self._taken += share
                turn.set_result(None)
