"""GB/s of KV from one replica to another, against copying the same bytes."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import numpy as np
from ray import serve

from bench.disaggregation.common import application, fetching, ray_with_serve
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.table import TransferTable
from cluster.router import EngineRouter
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVFormat, PendingBlocks
from engine.kv_connector import KVExport
from engine.request import FinishReason, RequestOutput

LLAMA_8B = KVFormat(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")


class Source:
    """A prefill replica whose KV is there before it is asked for: everything but the engine is real."""

    def __init__(self, config: EngineConfig, chunk_tokens: int) -> None:
        self._table = TransferTable(ObjectStoreTransport.of(config), TransferMetrics(), max_bytes=1 << 34, lease_s=60.0)
        shape = (LLAMA_8B.num_layers, 2, LLAMA_8B.num_kv_heads, chunk_tokens, LLAMA_8B.head_dim)
        data = np.random.default_rng(0).integers(0, 1 << 16, shape, dtype=np.uint16)
        self._blocks = _Ready(KVBlocks(format=LLAMA_8B, heads=range(LLAMA_8B.num_kv_heads), data=data))
        self._chunk_tokens = chunk_tokens
        self._replica = serve.get_replica_context().replica_id.unique_id

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        await self._table.open(ticket.transfer, order.num_bytes)
        for start in range(0, len(order.request.prompt_token_ids), self._chunk_tokens):
            self._table.exported(
                KVExport(
                    request_id=ticket.transfer,
                    start=start,
                    end=start + self._chunk_tokens,
                    blocks=self._blocks,
                    block_hashes=(),
                )
            )
        self._table.take_output(
            RequestOutput(request_id=ticket.transfer, token_ids=(1,), finish_reason=FinishReason.LENGTH)
        )
        return PrefillAnswer(next_token_id=1, logprobs=None, num_cached_tokens=0, compute_s=0.0, total_s=0.0)

    async def fetch_kv(self, ticket: TransferTicket, index: int, num_received: int) -> KVChunk | NoChunk:
        return await self._table.chunk(ticket.transfer, index, num_received)

    async def close_transfer(self, ticket: TransferTicket) -> None:
        self._table.close(ticket.transfer)


class _Ready(PendingBlocks):
    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    def result(self) -> tuple[KVBlocks, ...]:
        return (self._blocks,)


def speed(folder: Path, rounds: int) -> None:
    """Fetches 512 MiB per round, in objects of different sizes, and copies the same bytes in between."""
    config = EngineConfig.from_args({"backend": "mock"})
    print("| object | MiB per transfer | GB/s (median) | GB/s (best) | memcpy GB/s (median) | share |")
    print("| --- | --- | --- | --- | --- | --- |")
    with ray_with_serve(folder):
        for object_mib in (8, 16, 32, 64):
            tokens = object_mib * MIB // LLAMA_8B.bytes_per_token
            source = serve.deployment(
                name="Prefill", request_router_config={"request_router_class": EngineRouter}, max_ongoing_requests=100
            )(Source)
            with application(source.bind(config, tokens), "speed"):
                fetched, copied = asyncio.run(_speeds(config, 512 // object_mib * tokens, tokens, rounds))
            best, middle, copy = max(fetched), statistics.median(fetched), statistics.median(copied)
            print(
                f"| {object_mib} MiB | 512 | {middle:.2f} | {best:.2f} | {copy:.2f} | {middle / copy:.0%} |", flush=True
            )


async def _speeds(config: EngineConfig, num_tokens: int, chunk: int, rounds: int) -> tuple[list[float], list[float]]:
    size = num_tokens * LLAMA_8B.bytes_per_token
    fetched, copied = [], []
    source = np.ones(chunk * LLAMA_8B.bytes_per_token, np.uint8)
    async with fetching(config, "speed") as fetch:
        await fetch(num_tokens, LLAMA_8B)  # the handle finds its replica, and the store its pages
        for _ in range(rounds):
            started = time.perf_counter()
            await fetch(num_tokens, LLAMA_8B)
            fetched.append(size / (time.perf_counter() - started) / 1e9)
            started = time.perf_counter()
            for _ in range(num_tokens // chunk):
                source.copy()
            copied.append(size / (time.perf_counter() - started) / 1e9)
    return fetched, copied
