"""Follower: the thread that keeps a replica connected to the store, and its copy of the store's directory.

The copy is what makes the store free for prompts that it knows nothing of: a look at a set, and no question. It is some
100 ms late, which costs a computation that was not needed, or a question that finds less than was hoped for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from cluster.prefix_store.client import StoreClient, StoreError
from cluster.prefix_store.messages import Changes, Version
from cluster.prefix_store.metrics import StoreMetrics
from engine.errors import first_line

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
CHANGES_TIMEOUT_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
WARNING_INTERVAL_S = 300.0


class Follower:
    """Starts with `start`. Until the store answers, and when it has gone, no block is known.

    Args:
        identify: says whose KV it is; may take long. What it raises means that the store can't be used.
    """

    def __init__(self, client: StoreClient, identify: Callable[[], bytes], metrics: StoreMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._identify = identify
        self._known: set[bytes] = set()
        self._closed = threading.Event()
        self._warned_at = -WARNING_INTERVAL_S
        self.space: bytes | None = None  # set while the store can be used

    def start(self) -> None:
        threading.Thread(target=self._run, name="prefix-store-follower", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def knows(self, block_hash: bytes) -> bool:
        """Whether the store has a block; any thread."""
        return block_hash in self._known

    def learn(self, block_hashes: Sequence[bytes]) -> None:
        """The store has just taken these from here."""
        self._known.update(block_hashes)

    def num_known(self, block_hashes: Sequence[bytes], first: int, end: int) -> int:
        """How many blocks of a chain, from block `first` to `end` - 1, the store has without a gap."""
        known = self._known
        for index in range(first, end):
            if block_hashes[index] not in known:
                return index - first
        return max(0, end - first)

    def _run(self) -> None:
        try:
            space = self._identify()
        except Exception as error:
            logger.error("this replica does not use the prefix store: %s", first_line(error))
            return
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._client.join(JOIN_TIMEOUT_S)
                self._follow(space)
            except StoreError as error:
                self._warn(str(error))
            except Exception as error:
                logger.exception("following the prefix store failed")
                self._warn(f"internal error: {first_line(error)}")
            self.space, self._known = None, set()
            self._metrics.set(connected=0, used_bytes=0)
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            self._closed.wait(pause_s)

    def _follow(self, space: bytes) -> None:
        version = Version()
        while not self._closed.is_set():
            changes = self._client.changes(space, version, CHANGES_TIMEOUT_S)
            self._apply(changes)
            self.space, version = space, changes.version

    def _apply(self, changes: Changes) -> None:
        if changes.whole:
            self._known = set(changes.added)
        else:
            self._known.difference_update(changes.removed)
            self._known.update(changes.added)
        self._metrics.set(connected=1, used_bytes=changes.used_bytes)

    def _warn(self, problem: str) -> None:
        if not self._closed.is_set() and time.monotonic() - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = time.monotonic()
            logger.warning("prompts are computed without the prefix store for now: %s", problem)
