"""Waker: calls for an engine replica where Serve may have stopped all of them.

A request chooses its replica before its Serve call, and Serve does not count that search as demand: with no replica
left it would never end. So when a search takes long, an ordinary call is made beside it, which Serve counts, and for
which it starts a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LONG_SEARCH_S = 0.1
"""With a replica there, a search takes a millisecond or two."""


class Waker:
    """One per client; many searches make one call."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        """`call` waits until a replica has answered it, or fails."""
        self._call = call
        self._calling: asyncio.Future[object] | None = None

    async def patiently(self, search: Awaitable[T]) -> T:
        """Waits for a search, and makes the call if it is a long one."""
        searching = asyncio.ensure_future(search)
        try:
            done, _ = await asyncio.wait({searching}, timeout=LONG_SEARCH_S)
            if not done:
                self._wake()
            return await searching
        finally:
            searching.cancel()

    def _wake(self) -> None:
        if self._calling is None or self._calling.done():
            self._calling = asyncio.ensure_future(self._call())
            self._calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # the search will tell

    def close(self) -> None:
        if self._calling is not None:
            self._calling.cancel()
