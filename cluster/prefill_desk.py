"""PrefillDesk: the prompts that a prefill replica computes, between their Serve calls, its engine and their transfers.

`prefill` stays open while its prompt is computed, so that Serve's counts, cancellation and draining work on it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.table import TransferTable
from cluster.messages import Refusal, RefusalKind
from cluster.submission import submit
from engine.core import EngineCore
from engine.request import RequestOutput

GIVEN_UP = Refusal(kind=RefusalKind.UNAVAILABLE, message="the prompt was given up")


class PrefillDesk:
    """Use it from one event loop, except `emit`."""

    def __init__(self, table: TransferTable) -> None:
        self._table = table
        self._engine: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # known from the first prompt on
        self._outputs: deque[RequestOutput] = deque()

    def attach(self, engine: EngineCore) -> None:
        self._engine = engine

    # -- calls

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer | Refusal:
        """Computes a prompt and samples the token after it. Cancelling this gives it up.

        Serve may send a call twice, not knowing of the first one: the prompt is computed once.
        """
        arrived_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            transfer, refusal, output = self._table.get(ticket.transfer), None, None
            submitted_at = arrived_at
            if transfer is None:
                transfer = await self._table.open(ticket.transfer, order.num_bytes)
                submitted_at = time.monotonic()
                refusal = GIVEN_UP if transfer.failure else submit(self._engine, order.request)
            if refusal is None:
                async with self._table.call(ticket.transfer):
                    output = await transfer.computed()
        except asyncio.CancelledError:
            self.close(ticket)
            raise
        if output is None or not output.token_ids:
            self.close(ticket)
            reason = transfer.failure or (output and output.error) or GIVEN_UP.message
            return refusal or Refusal(kind=RefusalKind.UNAVAILABLE, message=reason)
        now = time.monotonic()
        return PrefillAnswer(
            next_token_id=output.token_ids[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            num_cached_tokens=output.num_cached_tokens,
            compute_s=now - submitted_at,
            total_s=now - arrived_at,
        )

    async def fetch(
        self, ticket: TransferTicket, index: int, num_received: int, *, described: bool = False
    ) -> KVChunk | NoChunk:
        return await self._table.chunk(ticket.transfer, index, num_received, described=described)

    async def give(self, ticket: TransferTicket, index: int, heads: range) -> object:
        return await self._table.give(ticket.transfer, index, heads)

    def close(self, ticket: TransferTicket) -> None:
        """Ends a transfer, and its prompt if that is still being computed."""
        self._table.close(ticket.transfer)
        if self._engine is not None:
            self._engine.abort(ticket.transfer)

    def fail_all(self) -> None:
        """Ends all calls."""
        self._table.close_all()

    # -- the engine's side

    def emit(self, outputs: list[RequestOutput]) -> None:
        """Takes a step's outputs on the engine's thread."""
        assert self._loop is not None  # outputs come from prompts only
        self._outputs.extend(outputs)
        self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        while self._outputs:
            output = self._outputs.popleft()
            self._table.take_output(output)
