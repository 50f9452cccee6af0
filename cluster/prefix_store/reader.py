"""Reader: KV of prompts, from the store into the engine's events, by a few threads and each with a deadline.

Whatever goes wrong, the request gets its KVComplete, and the engine computes what has not come.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from cluster.prefix_store.client import Found, StoreClient, StoreError
from cluster.prefix_store.metrics import StoreMetrics
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVLateError, KVLostError, KVPayload, Receive, RemotePayload, Run, joined
from engine.kv_connector import KVArrived, KVComplete, KVEvent

logger = logging.getLogger(__name__)

THREADS = 2
MAX_FETCHES = 16
"""Requests that are fetched for at a time; others compute their prompts."""
FIXED_TIMEOUT_S = 1.0
SLOWEST_BYTES_PER_S = 256 << 20
"""A fetch that is slower than this, after a fixed time, is given up."""
REST_S = 5.0
"""So long nothing is asked of a store that has not answered in time."""
LATE = "KV did not come from the prefix store in time"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensOf(RemotePayload):
    """Tokens first .. end - 1 of a payload."""

    payload: KVPayload
    first: int
    end: int

    def part(self, heads: range) -> KVPayload:
        return replace(self, payload=self.payload.part(heads))

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        return joined([Run(shares=self.payload.fetch(timeout_s), first=self.first, end=self.end)])


@dataclass(kw_only=True, slots=True)
class _Fetch:
    request_id: str
    start: int  # token
    block_hashes: Sequence[bytes]
    begun: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    arrived: int = 0  # up to which token


class Reader:
    """`begin`, `cancel` and `events` are called by the engine's thread and return at once.

    Args:
        receive: brings KV to the hosts that will write it.
        wake: called, from any thread, when there are events.
    """

    def __init__(
        self,
        client: StoreClient,
        receive: Receive,
        metrics: StoreMetrics,
        wake: Callable[[], None],
        *,
        block_size: int,
        bytes_per_block: int,
    ) -> None:
        self._client = client
        self._receive = receive
        self._metrics = metrics
        self._wake = wake
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._fetches: dict[str, _Fetch] = {}
        self._events: queue.SimpleQueue[tuple[_Fetch, KVEvent]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prefix-store-reader")
        self._resting_until = 0.0

    def begin(self, space: bytes, request_id: str, start: int, block_hashes: Sequence[bytes]) -> bool:
        """Begins to fetch the blocks whose first token is `start`; False if too much is under way."""
        if len(self._fetches) >= MAX_FETCHES or time.monotonic() < self._resting_until:
            self._metrics.add(reads_dropped=1)
            return False
        fetch = _Fetch(request_id=request_id, start=start, block_hashes=block_hashes, arrived=start)
        self._fetches[request_id] = fetch
        self._pool.submit(self._run, space, fetch)
        return True

    def cancel(self, request_id: str) -> None:
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.cancelled = True

    def events(self) -> list[KVEvent]:
        events: list[KVEvent] = []
        while True:
            try:
                fetch, event = self._events.get_nowait()
            except queue.Empty:
                return events
            if fetch.cancelled:
                continue
            events.append(event)
            if isinstance(event, KVComplete):
                del self._fetches[fetch.request_id]

    def close(self) -> None:
        for fetch in self._fetches.values():
            fetch.cancelled = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- a thread of the pool

    def _run(self, space: bytes, fetch: _Fetch) -> None:
        failure = None
        try:
            self._fetch(space, fetch)
        except (StoreError, KVLostError) as error:
            failure = str(error)
        except Exception as error:
            logger.exception("reading from the prefix store failed")
            failure = f"internal error: {first_line(error)}"
        self._metrics.add(
            reads=1,
            hit_tokens=fetch.arrived - fetch.start,
            read_seconds=time.monotonic() - fetch.begun,
            reads_dropped=int(failure is not None),
        )
        self._post(fetch, KVComplete(request_id=fetch.request_id, num_cached_tokens=fetch.arrived, failure=failure))

    def _fetch(self, space: bytes, fetch: _Fetch) -> None:
        if time.monotonic() < self._resting_until:  # since an earlier one, for which this one waited
            raise StoreError(LATE)
        num_bytes = len(fetch.block_hashes) * self._bytes_per_block
        deadline = time.monotonic() + FIXED_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        try:
            for found in self._client.find(space, fetch.block_hashes, _left(deadline)):
                if fetch.cancelled:
                    return
                self._read(fetch, found, _left(deadline))
        except (StoreError, KVLateError):
            self._resting_until = time.monotonic() + REST_S
            raise

    def _read(self, fetch: _Fetch, found: Found, timeout_s: float) -> None:
        run, size = found.run, self._block_size
        segment = self._client.payload(found)
        wanted = TokensOf(payload=segment, first=run.first * size, end=(run.first + run.count) * size)
        try:
            [payload] = self._receive([wanted], timeout_s)
        except KVLateError:
            raise
        except KVLostError:
            self._client.lost(found)
            raise
        start, fetch.arrived = fetch.arrived, fetch.arrived + run.count * size
        self._metrics.add(read_bytes=run.count * self._bytes_per_block)
        self._post(fetch, KVArrived(request_id=fetch.request_id, start=start, end=fetch.arrived, payload=payload))

    def _post(self, fetch: _Fetch, event: KVEvent) -> None:
        self._events.put((fetch, event))
        self._wake()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreError(LATE)
    return left
