"""Unwanted: KV at a gang's hosts that nobody needs any more. A thread tells the hosts, as finalizers must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from engine.backend import BackendError


class Unwanted:
    """
    Args:
        tell: sends keys to the hosts: of what they have read, and of what has come to them.
    """

    def __init__(self, tell: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self._tell = tell
        self._keys: queue.SimpleQueue[tuple[bool, int] | None] = queue.SimpleQueue()  # whether it was read, and its key
        self._thread = threading.Thread(target=self._run, name="gang-unwanted", daemon=True)
        self._thread.start()

    def read(self, key: int) -> None:
        """What was read is needed no more. Finalizers may call this and `received`, on any thread, at any time."""
        self._keys.put((True, key))

    def received(self, key: int) -> None:
        """What has come will not be written."""
        self._keys.put((False, key))

    def close(self) -> None:
        self._keys.put(None)

    def _run(self) -> None:
        while (first := self._keys.get()) is not None:
            keys = [first]
            while not self._keys.empty():
                more = self._keys.get()
                if more is None:
                    return
                keys.append(more)
            try:
                self._tell([key for was_read, key in keys if was_read], [key for was_read, key in keys if not was_read])
            except BackendError:  # the gang has ended, and its hosts with all they had
                return
