"""Noticing that a client went away, whether it waits for a stream or for one JSON document."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cluster.ingress.errors import ClientDisconnectedError

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end, or cancels it as soon as the client is gone or the caller is cancelled.

    The body must have been read: from then on the server's `receive` says nothing before the disconnect.

    Raises:
        ClientDisconnectedError: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        # Closing engine requests happens while `task` unwinds; it must be over before the caller goes on.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
