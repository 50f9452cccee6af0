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
NEXT_CALL_S = 1.0
"""A call that failed is made again after so long at most."""


class Waker:
    """One per client; many searches make one call."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        """`call` waits until a replica has answered it, or fails. It must not end with the request that made it."""
        self._call = call
        self._calling: asyncio.Future[object] | None = None

    async def patiently(self, search: Awaitable[T]) -> T:
        """Waits for a search, and sees to it that the call is open if it is a long one."""
        searching = asyncio.ensure_future(search)
        try:
            done, _ = await asyncio.wait({searching}, timeout=LONG_SEARCH_S)
            while not done:
                self._wake()
                done, _ = await asyncio.wait({searching}, timeout=NEXT_CALL_S)
            return searching.result()
        finally:
            searching.cancel()

    def _wake(self) -> None:
        if self._calling is None or self._calling.done():
            self._calling = asyncio.ensure_future(self._call())
            self._calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # the search will tell

    def close(self) -> None:
        if self._calling is not None:
            self._calling.cancel()
