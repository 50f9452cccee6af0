"""Fetch: one prompt computed by a prefill replica, seen from the decode replica that needs it.

One call asks for the prompt and returns with the token after it; others, a few at a time, each bring a chunk of its KV
as soon as that is computed, so that most of the KV is here when the last of it is computed. Whatever goes wrong ends
the fetch with what has arrived by then: the engine computes the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from cluster.kv_transfer.messages import (
    KVChunk,
    NoChunk,
    PrefillAnswer,
    PrefillOrder,
    TransferTicket,
)
from cluster.kv_transfer.prefill_pool import PrefillError, PrefillPool
from cluster.kv_transfer.transport import Arrival, KVTransport
from engine.kv_blocks import KVLateError, KVLostError, Receive
from engine.kv_connector import KVArrived, KVComplete, KVDemand, KVEvent

WINDOW = 3
"""Calls for chunks at a time: one that arrives, one that is being read out, one that waits to be computed."""
NOBODY = "there is no prefill replica"
CHOICE_TIMEOUT_S = 2.0
"""Longest wait for there to be a prefill replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRecord:
    """Times of one chunk, in seconds since the fetch began."""

    index: int
    num_bytes: int
    computed_at: float  # and on its way from then on
    arrived_at: float

    @property
    def transfer_s(self) -> float:
        return self.arrived_at - self.computed_at


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRecord:
    """Times of a fetch that has brought everything, in seconds."""

    num_computed: int  # tokens that the prefill replica computed
    compute_s: float
    overhead_s: float  # what it took beyond the time at the prefill replica
    exposed_s: float  # from the answer to the arrival of the last KV
    chunks: tuple[ChunkRecord, ...]


class Fetch:
    """Use it from one event loop.

    Args:
        receive: brings KV to the hosts that will write it; waits, on a thread of `receivers`.
        described: the KV goes to several hosts, each of which fetches its own.
        deliver: takes the events.
        count_chunk: takes each chunk's record as it arrives.
    """

    def __init__(
        self,
        transfer: str,
        demand: KVDemand,
        pool: PrefillPool,
        transport: KVTransport,
        receive: Receive,
        receivers: Executor,
        *,
        described: bool,
        timeout_s: float,
        deliver: Callable[[KVEvent], None],
        count_chunk: Callable[[ChunkRecord], None],
    ) -> None:
        self._transfer = transfer
        self._demand = demand
        self._end = len(demand.token_ids)
        self._pool = pool
        self._transport = transport
        self._receive_blocks = receive
        self._receivers = receivers
        self._described = described
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._count_chunk = count_chunk
        self._arrived = demand.num_cached_tokens
        self._num_delivered = 0  # chunks
        self._arrivals: dict[int, list[Arrival]] = {}  # by chunk, of those before which one is missing
        self._calls: set[asyncio.Task[None]] = set()
        self._errors: list[Exception] = []  # of calls
        self._num_asked = 0  # chunks
        self._answered: set[int] = set()  # of those
        self._num_awaited = 0
        self._has_ended = False  # there are no more chunks than have been asked for
        self._answer: PrefillAnswer | None = None
        self._began_at = time.monotonic()
        self._answered_at = 0.0
        self._records: list[ChunkRecord] = []

    async def run(self, num_bytes: int) -> FetchRecord:
        """Fetches, and delivers events up to the last one.

        Raises:
            PrefillError: not all has come; the last event is not delivered.
        """
        self._began_at = time.monotonic()
        ticket = TransferTicket(replica=await self._choose(), transfer=self._transfer)
        try:
            self._start(self._ask(ticket, num_bytes))
            await self._receive_all(ticket, num_bytes)
            return self._complete()
        except PrefillError as error:
            if error.reason in ("unavailable", "timeout"):
                error.nobody_is_left = self._pool.suspect(ticket.replica)
            raise
        finally:
            self._pool.close(ticket)
            await self._end_calls()

    async def _choose(self) -> str:
        try:
            async with asyncio.timeout(CHOICE_TIMEOUT_S):
                return await self._pool.choose(self._demand.request, self._transfer)
        except TimeoutError:
            raise PrefillError("unavailable", NOBODY, nobody_is_left=True) from None
        except PrefillError as error:
            error.nobody_is_left = error.reason == "unavailable"
            raise

    async def _receive_all(self, ticket: TransferTicket, num_bytes: int) -> None:
        while self._answer is None or self._arrived < self._end:
            while self._wants_another(num_bytes):
                self._start(self._fetch_chunk(ticket, self._num_asked))
                self._num_asked += 1
                self._num_awaited += 1
            if not self._calls:
                raise PrefillError("lost", f"prefill ended with KV of {self._arrived} of {self._end} tokens")
            if not await self._some_end():
                raise PrefillError("timeout", f"no KV came for {self._timeout_s:g} s (kv_transfer_timeout_s)")
            if self._errors:
                raise self._errors.pop()

    async def _some_end(self) -> bool:
        """Whether calls end in time. A method of its own, as an error that is raised keeps its frame, which would keep
        the calls that are still open."""
        done, _ = await asyncio.wait(self._calls, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._calls -= done
        return bool(done)

    def _wants_another(self, num_bytes: int) -> bool:
        if self._has_ended or self._arrived >= self._end:
            return False
        has_room = self._num_asked < self._num_delivered + WINDOW
        is_likely = self._num_asked * self._transport.min_bytes <= num_bytes
        return (has_room and is_likely) or not self._num_awaited

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        self._calls.add(asyncio.create_task(self._noting_errors(call)))

    async def _noting_errors(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except Exception as error:
            self._errors.append(error)

    async def _end_calls(self) -> None:
        """Ends the calls, and takes apart what would keep their KV in memory until Python looks for cycles, which in an
        engine without work is never: an error holds the frames that it came through, and they this object."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        self._calls.clear()
        self._errors.clear()
        self._arrivals.clear()

    async def _ask(self, ticket: TransferTicket, num_bytes: int) -> None:
        self._answer = await self._pool.prefill(ticket, self._order(num_bytes))
        self._answered_at = time.monotonic()

    def _order(self, num_bytes: int) -> PrefillOrder:
        request = self._demand.request
        known = self._demand.token_ids[len(request.prompt_token_ids) :]
        return PrefillOrder(
            request=replace(
                request,
                request_id=self._transfer,
                sampling=replace(request.sampling, max_tokens=len(known) + 1),
                output_token_ids=known,
                export_from=self._demand.num_cached_tokens,
            ),
            num_bytes=num_bytes,
        )

    async def _fetch_chunk(self, ticket: TransferTicket, index: int) -> None:
        called_at = time.monotonic()
        try:
            chunk = await self._bring(ticket, index)
        except PrefillError as error:
            if error.reason != "lost":
                raise
            chunk = await self._bring(ticket, index)  # it is kept until acknowledged
        if chunk is not None:
            self._record(index, chunk, called_at)
            self._deliver_in_order()

    async def _bring(self, ticket: TransferTicket, index: int) -> KVChunk | None:
        """A chunk that is with the hosts that will write it; None if there is none."""
        chunk, source = await self._pool.fetch(ticket, index, self._num_delivered, described=self._described)
        if index not in self._answered:
            self._answered.add(index)
            self._num_awaited -= 1
        if isinstance(chunk, NoChunk):
            if chunk.failure is not None:
                raise PrefillError("unavailable", chunk.failure)
            self._has_ended = True
            return None
        loop = asyncio.get_running_loop()
        self._arrivals[index] = await loop.run_in_executor(self._receivers, self._receive, chunk, source)
        return chunk

    def _receive(self, chunk: KVChunk, source: object) -> list[Arrival]:
        try:
            arrivals = self._transport.unpack(chunk, source)
            payloads = self._receive_blocks([each.payload for each in arrivals], self._timeout_s)
        except KVLateError as error:
            raise PrefillError("timeout", str(error)) from None
        except KVLostError as error:
            raise PrefillError("lost", str(error)) from None
        return [replace(each, payload=payload) for each, payload in zip(arrivals, payloads, strict=True)]

    def _record(self, index: int, chunk: KVChunk, called_at: float) -> None:
        record = ChunkRecord(
            index=index,
            num_bytes=chunk.num_bytes,
            computed_at=called_at + chunk.waited_s - self._began_at,
            arrived_at=time.monotonic() - self._began_at,
        )
        self._records.append(record)
        self._count_chunk(record)

    def _deliver_in_order(self) -> None:
        while (arrivals := self._arrivals.pop(self._num_delivered, None)) is not None:
            for arrival in arrivals:
                self._deliver(
                    KVArrived(
                        request_id=self._demand.request.request_id,
                        start=arrival.start,
                        end=arrival.end,
                        payload=arrival.payload,
                    )
                )
                self._arrived = arrival.end
            self._num_delivered += 1

    def _complete(self) -> FetchRecord:
        answer, request = self._answer, self._demand.request
        assert answer is not None  # _receive_all waits for it
        self._deliver(
            KVComplete(
                request_id=request.request_id,
                next_token_id=answer.next_token_id,
                logprobs=answer.logprobs,
                num_cached_tokens=answer.num_cached_tokens,
            )
        )
        now = time.monotonic()
        return FetchRecord(
            num_computed=self._end - answer.num_cached_tokens,
            compute_s=answer.compute_s,
            overhead_s=now - self._began_at - answer.total_s,
            exposed_s=now - self._answered_at,
            chunks=tuple(self._records),
        )
