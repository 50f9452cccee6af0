"""KV with known content, and prefill replicas without Ray."""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.kv_transfer.messages import MAIN, KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.object_store import ObjectStoreTransport
from cluster.kv_transfer.prefill_pool import PrefillError, PrefillPool
from cluster.kv_transfer.transfer import Transfer
from engine.kv_blocks import KVBlocks, KVFormat
from engine.kv_connector import KVDemand, KVExport
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from tests.cluster.kv_backend import Ready

FORMAT = KVFormat(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16")
MIB = 1 << 20


def blocks(start: int, end: int, *, kv_format: KVFormat = FORMAT, cut: int = 4) -> list[KVBlocks]:
    """KV of these tokens, each filled with its number; heads in two shares."""
    tokens = np.arange(start, end, dtype=np.uint16)[:, None]
    shares = []
    for heads in (range(cut), range(cut, kv_format.num_kv_heads)):
        shape = (kv_format.num_layers, 2, len(heads), end - start, kv_format.head_dim)
        if heads:
            shares.append(
                KVBlocks(format=kv_format, heads=heads, data=np.ascontiguousarray(np.broadcast_to(tokens, shape)))
            )
    return shares


def export(start: int, end: int, kv_format: KVFormat = FORMAT) -> KVExport:
    shares = blocks(start, end, kv_format=kv_format, cut=2)
    return KVExport(request_id="t", start=start, end=end, blocks=Ready(shares), block_hashes=())


def request(num_tokens: int, name: str = "r") -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(range(num_tokens)), sampling=SamplingParams(max_tokens=5, seed=3)
    )


def demand(num_tokens: int, num_cached: int = 0, name: str = "r") -> KVDemand:
    asked = request(num_tokens, name)
    return KVDemand(request=asked, token_ids=asked.prompt_token_ids, num_cached_tokens=num_cached, block_hashes=())


def last_output(token: int = 77) -> RequestOutput:
    return RequestOutput(request_id="t", token_ids=(token,), finish_reason=FinishReason.LENGTH, num_cached_tokens=4)


@dataclass
class LocalPool(PrefillPool):
    """One prefill replica in this process. Its chunks hold `chunk_tokens` each, computed in `chunk_s`."""

    chunk_tokens: int = 10
    chunk_s: float = 0.0
    fails_at: int | None = None  # at this call of all
    failure: Exception = field(default_factory=lambda: PrefillError("unavailable", "killed"))
    hangs_at: int | None = None
    min_bytes: int = 0
    calls: int = 0
    is_alone: bool = True
    suspects: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    orders: list[PrefillOrder] = field(default_factory=list)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    given: list[weakref.ref[np.ndarray[Any, Any]]] = field(default_factory=list)  # KV

    def __post_init__(self) -> None:
        self._readers = ThreadPoolExecutor(1)
        self._transport = ObjectStoreTransport(checksums=True, min_bytes=self.min_bytes)

    async def choose(self, request: EngineRequest, transfer: str) -> str:  # noqa: ARG002
        await self._count()
        return "p"

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        await self._count()
        self.orders.append(order)
        transfer = self._transfer(ticket)
        asked = order.request
        start, goal = asked.export_from or 0, len(asked.prompt_token_ids) + len(asked.output_token_ids)
        while start < goal:
            end = min(start + self.chunk_tokens, goal)
            await asyncio.sleep(self.chunk_s)
            transfer.add(export(start, end))
            start = end
        transfer.take(last_output())
        return PrefillAnswer(next_token_id=77, logprobs=None, num_cached_tokens=4, compute_s=0.1, total_s=0.1)

    async def fetch(
        self, ticket: TransferTicket, index: int, num_received: int, *, described: bool
    ) -> tuple[KVChunk | NoChunk, object]:
        assert not described
        await self._count()
        chunk = await self._transfer(ticket).chunk(index, num_received)
        if isinstance(chunk, KVChunk):
            self.given += [weakref.ref(share.data) for piece in chunk.pieces for share in piece.sections[MAIN]]
        return chunk, None

    def suspect(self, replica: str) -> bool:
        self.suspects.append(replica)
        return self.is_alone

    def close(self, ticket: TransferTicket) -> None:
        self.closed.append(ticket.transfer)
        if ticket.transfer in self.transfers:
            self.transfers.pop(ticket.transfer).fail("closed")

    def _transfer(self, ticket: TransferTicket) -> Transfer:
        if ticket.transfer not in self.transfers:
            self.transfers[ticket.transfer] = Transfer(self._transport, self._readers, max_bytes=64 * MIB)
        return self.transfers[ticket.transfer]

    async def _count(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.hangs_at:
            await asyncio.sleep(3600)
        if self.calls - 1 == self.fails_at:
            raise self.failure
