"""Shelf: where one thread leaves something under a key that others come for, maybe first."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shelf(Generic[T]):
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._things: dict[Hashable, T] = {}

    def put(self, key: Hashable, thing: T) -> None:
        with self._changed:
            self._things[key] = thing
            self._changed.notify_all()

    def get(self, key: Hashable, timeout_s: float) -> T:
        """What lies there, and stays.

        Raises:
            TimeoutError: nobody has put anything there.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._things, timeout_s):
                raise TimeoutError(f"nothing came for {key} within {timeout_s:g} s")
            return self._things[key]

    def take(self, key: Hashable) -> T:
        """What lies there now.

        Raises:
            KeyError: nothing does.
        """
        with self._changed:
            return self._things.pop(key)

    def drop(self, keys: Iterable[Hashable]) -> None:
        with self._changed:
            for key in keys:
                self._things.pop(key, None)

    def __len__(self) -> int:
        return len(self._things)
