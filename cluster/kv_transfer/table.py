"""TransferTable: all transfers of one prefill replica, with what bounds them: bytes, leases, deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from cluster.kv_transfer.budget import ByteBudget
from cluster.kv_transfer.messages import KVChunk, NoChunk
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.transfer import Transfer
from cluster.kv_transfer.transport import KVTransport
from engine.kv_connector import KVExport
from engine.request import RequestOutput

logger = logging.getLogger(__name__)

UNKNOWN = "the prefill replica does not know this transfer (any more)"
READERS = 2
"""Threads that wait for devices and copy what they have read."""


class TransferTable:
    """Use it from one event loop, except `exported`."""

    def __init__(self, transport: KVTransport, metrics: TransferMetrics, *, max_bytes: int, lease_s: float) -> None:
        """
        Args:
            max_bytes: of all prompts whose KV is on its way; further ones wait.
            lease_s: how long a transfer is kept when nobody calls for it any more.
        """
        self._transport = transport
        self.metrics = metrics
        self._max_bytes = max_bytes
        self._lease_s = lease_s
        self._budget = ByteBudget(max_bytes)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._loop: asyncio.AbstractEventLoop | None = None  # known from the first transfer on
        self._transfers: dict[str, Transfer] = {}
        self._shares: dict[str, int] = {}  # of the budget
        self._expected: dict[str, set[asyncio.Future[None]]] = {}  # calls that wait for their transfer to be opened
        self._exports: deque[KVExport] = deque()

    def exported(self, export: KVExport) -> None:
        """Takes KV from the engine's thread."""
        self._exports.append(export)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_exports)

    def take_output(self, output: RequestOutput) -> None:
        """What the engine yields for a transfer's prompt. It may overtake KV that was exported before it."""
        self._take_exports()
        transfer = self._transfers.get(output.request_id)
        if transfer is not None:
            transfer.take(output)

    def _take_exports(self) -> None:
        while self._exports:
            export = self._exports.popleft()
            transfer = self._transfers.get(export.request_id)
            if transfer is not None:  # else it was given up meanwhile
                transfer.add(export)
        self._count_bytes()

    def get(self, transfer_id: str) -> Transfer | None:
        return self._transfers.get(transfer_id)

    async def open(self, transfer_id: str, num_bytes: int) -> Transfer:
        """A new transfer, once there is room for its bytes. `close` ends it, or its lease."""
        self._loop = asyncio.get_running_loop()
        transfer = Transfer(self._transport, self._readers, max_bytes=self._max_bytes)
        self._transfers[transfer_id] = transfer
        for waiting in self._expected.pop(transfer_id, ()):
            if not waiting.done():
                waiting.set_result(None)
        self.metrics.started += 1
        try:
            share = await self._budget.take(num_bytes)
        except asyncio.CancelledError:
            self.close(transfer_id)
            raise
        if self._transfers.get(transfer_id) is transfer:
            self._shares[transfer_id] = share
        else:  # it was closed while it waited
            self._budget.give_back(share)
        return transfer

    @asynccontextmanager
    async def call(self, transfer_id: str) -> AsyncIterator[Transfer | None]:
        """Around a call for a transfer; None if there is none. Without calls, a transfer ends after a while."""
        transfer = await self._find(transfer_id)
        if transfer is None:
            yield None
            return
        transfer.num_calls += 1
        try:
            yield transfer
        finally:
            transfer.num_calls -= 1
            if not transfer.num_calls and self._transfers.get(transfer_id) is transfer:
                loop = asyncio.get_running_loop()
                transfer.idle_since = loop.time()
                loop.call_at(transfer.idle_since + self._lease_s, self._check_lease, transfer_id, transfer.idle_since)

    async def chunk(
        self, transfer_id: str, index: int, num_received: int, *, described: bool = False
    ) -> KVChunk | NoChunk:
        """See Transfer.chunk."""
        async with self.call(transfer_id) as transfer:
            if transfer is None:
                return NoChunk(failure=UNKNOWN)
            chunk = await transfer.chunk(index, num_received, described=described)
        if isinstance(chunk, KVChunk):
            self.metrics.count_chunk(chunk.num_bytes)
        self._count_bytes()
        return chunk

    async def give(self, transfer_id: str, index: int, heads: range) -> object:
        """See Transfer.give."""
        transfer = self._transfers.get(transfer_id)
        return NoChunk(failure=UNKNOWN) if transfer is None else await transfer.give(index, heads)

    def close(self, transfer_id: str) -> None:
        """Nobody needs this transfer any more, if it is there."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            transfer.fail("the transfer is closed")
            self._budget.give_back(self._shares.pop(transfer_id, 0))
            self._count_bytes()

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    async def _find(self, transfer_id: str) -> Transfer | None:
        """Calls of a transfer may overtake the one that opens it."""
        if transfer_id not in self._transfers:
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            expected = self._expected.setdefault(transfer_id, set())
            expected.add(opened)
            try:
                async with asyncio.timeout(self._lease_s):
                    await opened
            except TimeoutError:
                return None
            finally:
                expected.discard(opened)
                if not expected:
                    self._expected.pop(transfer_id, None)
        return self._transfers.get(transfer_id)

    def _check_lease(self, transfer_id: str, idle_since: float) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and not transfer.num_calls and transfer.idle_since == idle_since:
            logger.warning("transfer %s: nobody fetches its KV; it is dropped", transfer_id)
            self.metrics.count_failure("lease")
            self.close(transfer_id)

    def _count_bytes(self) -> None:
        self.metrics.bytes_in_flight = sum(transfer.num_bytes for transfer in self._transfers.values())
        self.metrics.open = len(self._transfers)

    def close_all(self) -> None:
        for transfer_id in list(self._transfers):
            self.close(transfer_id)

    def shut_down(self) -> None:
        self.close_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
