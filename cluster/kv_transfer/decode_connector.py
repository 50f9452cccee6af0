"""DecodeConnector: a decode replica's KVConnector, which has long prompts computed by prefill replicas.

The engine's thread asks `fetch` and takes events; fetches run on an asyncio loop of their own, as Serve handles need
one and the engine must not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.kv_transfer.budget import ByteBudget
from cluster.kv_transfer.fetch import Fetch
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.prefill_pool import PrefillError, PrefillPool
from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.kv_transfer.transport import KVTransport
from engine.backend import Backend
from engine.errors import first_line
from engine.kv_connector import KVComplete, KVConnector, KVDemand, KVEvent
from engine.metrics import MetricsSnapshot

logger = logging.getLogger(__name__)

REST_S = 5.0
"""How long prompts are computed here after there was no prefill replica to ask, or none that had not just failed."""
RECEIVERS = 16
"""Threads that wait for KV to come to this replica's hosts."""
CLOSE_TIMEOUT_S = 2.0


class DecodeConnector(KVConnector):
    """`fetch`, `cancel`, `events` run on the engine's thread, everything else on the loop's."""

    def __init__(
        self,
        replica: str,
        backend: Backend,
        make_pool: Callable[[], PrefillPool],
        transport: KVTransport,
        threshold: PrefillThreshold,
        metrics: TransferMetrics,
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        """
        Args:
            replica: this one's unique id, for names of transfers.
            backend: loaded by the time of `attach`; KV comes to its hosts.
            make_pool: called once, on the loop.
            max_bytes: of KV on its way here; further prompts wait for it, and for no longer than `timeout_s`.
        """
        self._replica = replica
        self._backend = backend
        self._make_pool = make_pool
        self._transport = transport
        self._threshold = threshold
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._bytes_per_token = 1
        self._wake: Callable[[], None] = lambda: None
        # The engine thread's:
        self._numbers = itertools.count()
        self._transfers: dict[str, str] = {}  # request id -> transfer
        # Written on one side and read on the other:
        self._events: deque[tuple[str, KVEvent]] = deque()  # of which transfer
        self._rests_until = 0.0
        # The loop's:
        self._budget = ByteBudget(max_bytes)
        self._receivers = ThreadPoolExecutor(RECEIVERS, thread_name_prefix="kv-receive")
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by transfer
        self._pool: PrefillPool | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kv-fetch", daemon=True)

    # -- the engine's thread

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._bytes_per_token = self._backend.kv_format().bytes_per_token
        self._metrics.min_prefill_tokens = self._threshold.tokens
        self._thread.start()

    def fetch(self, demand: KVDemand) -> int | None:
        end = len(demand.token_ids)
        num_missing = end - demand.num_cached_tokens
        if num_missing < max(1, self._threshold.tokens) or time.monotonic() < self._rests_until:
            return None
        transfer = f"{self._replica}-{next(self._numbers)}"
        self._transfers[demand.request.request_id] = transfer
        self._loop.call_soon_threadsafe(self._start, transfer, demand)
        return end

    def cancel(self, request_id: str) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            self._loop.call_soon_threadsafe(self._cancel, transfer)

    def events(self) -> Sequence[KVEvent]:
        events = []
        while self._events:
            transfer, event = self._events.popleft()
            if self._transfers.get(event.request_id) == transfer:
                events.append(event)
                if isinstance(event, KVComplete):
                    del self._transfers[event.request_id]
        return events

    def metrics(self) -> MetricsSnapshot:
        return self._metrics.snapshot()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(CLOSE_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
        self._receivers.shutdown(wait=False, cancel_futures=True)

    # -- the loop's thread

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _start(self, transfer: str, demand: KVDemand) -> None:
        task = self._tasks[transfer] = asyncio.create_task(self._run(transfer, demand))
        task.add_done_callback(lambda _: self._ended(transfer))
        self._metrics.open = len(self._tasks)

    def _ended(self, transfer: str) -> None:
        del self._tasks[transfer]
        self._metrics.open = len(self._tasks)

    def _cancel(self, transfer: str) -> None:
        task = self._tasks.get(transfer)
        if task is not None:
            task.cancel()

    async def _cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, transfer: str, demand: KVDemand) -> None:
        """One fetch, whose last event is delivered whatever happens."""
        try:
            await self._fetch(transfer, demand)
        except PrefillError as error:
            self._failed(transfer, demand, error)
        except Exception as error:  # a bug must not leave the request waiting
            logger.exception("transfer %s", transfer)
            self._failed(transfer, demand, PrefillError("unavailable", f"internal error: {first_line(error)}"))

    async def _fetch(self, transfer: str, demand: KVDemand) -> None:
        self._pool = self._pool or self._make_pool()
        num_tokens = len(demand.token_ids) - demand.num_cached_tokens
        num_bytes = num_tokens * self._bytes_per_token
        fetch = Fetch(
            transfer,
            demand,
            self._pool,
            self._transport,
            self._backend.receive_blocks,
            self._receivers,
            described=self._backend.num_hosts > 1,
            timeout_s=self._timeout_s,
            deliver=lambda event: self._deliver(transfer, event),
            count_chunk=lambda chunk: self._metrics.count_chunk(chunk.num_bytes, chunk.transfer_s),
        )
        self._metrics.started += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                share = await self._budget.take(num_bytes)
        except TimeoutError:
            raise PrefillError("timeout", "there was no room for more KV on its way (kv_transfer_max_mib)") from None
        try:
            self._metrics.bytes_in_flight = self._budget.taken
            record = await fetch.run(num_bytes)
        finally:
            self._budget.give_back(share)
            self._metrics.bytes_in_flight = self._budget.taken
        self._metrics.tokens += num_tokens
        self._metrics.exposed_s += record.exposed_s
        self._threshold.learn(
            num_computed=record.num_computed, compute_s=record.compute_s, overhead_s=record.overhead_s
        )
        self._metrics.min_prefill_tokens = self._threshold.tokens

    def _deliver(self, transfer: str, event: KVEvent) -> None:
        self._events.append((transfer, event))
        self._wake()

    def _failed(self, transfer: str, demand: KVDemand, error: PrefillError) -> None:
        self._metrics.count_failure(error.reason)
        if error.nobody_is_left:
            self._rests_until = time.monotonic() + REST_S
        self._deliver(transfer, KVComplete(request_id=demand.request.request_id, failure=str(error)))
