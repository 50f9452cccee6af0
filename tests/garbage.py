"""What tests of memory do to Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Meanwhile only what nothing refers to any more is freed, as in an idle process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def search_of_new_objects() -> Iterator[None]:
    """Meanwhile `gc.collect` leaves alone what is older: a second's worth of objects in a process with JAX."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
