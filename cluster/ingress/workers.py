"""Workers: threads for reading large requests, so that one client's novel does not stall everybody's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 8192
"""Bodies up to this size are read within a millisecond or two; handing them to a thread would cost more."""
THREADS = 2

T = TypeVar("T")


class Workers:
    """A few threads. They help because the tokenizer, which takes longest, runs without the GIL."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="read-request")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns for `size` bytes of request: done here if they are few, otherwise on a thread."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
