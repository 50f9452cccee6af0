"""GB/s of KV from one replica to another, against copying the same bytes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ray import serve

from bench.disaggregation.common import Decoder, application, ray_with_serve
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.table import TransferTable
from cluster.roles import Role
from cluster.router import EngineRouter
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVFormat, PendingBlocks
from engine.kv_connector import KVExport
from engine.request import FinishReason, RequestOutput

Bytes = NDArray[np.uint8]
TRANSFER_MIB = 512
LLAMA_8B = KVFormat(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")


class Source:
    """A prefill replica whose KV is there before it is asked for: everything but the engine is real."""

    def __init__(self, config: EngineConfig, chunk_tokens: int) -> None:
        self._table = TransferTable(
            ObjectStoreTransport.of(config), TransferMetrics(Role.PREFILL), max_bytes=1 << 34, lease_s=60.0
        )
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

    async def fetch_kv(
        self, ticket: TransferTicket, index: int, num_received: int, described: bool
    ) -> KVChunk | NoChunk:
        return await self._table.chunk(ticket.transfer, index, num_received, described=described)

    async def close_transfer(self, ticket: TransferTicket) -> None:
        self._table.close(ticket.transfer)


class _Ready(PendingBlocks):
    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    def result(self) -> tuple[KVBlocks, ...]:
        return (self._blocks,)


def speed(folder: Path, rounds: int) -> None:
    """Fetches 512 MiB per round, exported in steps of different sizes, and copies as many bytes in between."""
    config = EngineConfig.from_args({"backend": "mock"})
    source = np.random.default_rng(0).integers(0, 256, TRANSFER_MIB * MIB, dtype=np.uint8)
    target = np.empty_like(source)
    print("| export | MiB per transfer | GB/s (median) | GB/s (best) | memcpy GB/s (median) | share of memcpy |")
    print("| --- | --- | --- | --- | --- | --- |")
    with ray_with_serve(folder):
        decoder = Decoder(config)
        for step_mib in (8, 16, 32, 64):
            chunk = step_mib * MIB // LLAMA_8B.bytes_per_token
            name = f"speed-{step_mib}"
            with application(_app(config, chunk), name):
                fetched, copied = _measure(decoder, name, TRANSFER_MIB // step_mib * chunk, rounds, source, target)
            best, middle, copy = max(fetched), statistics.median(fetched), statistics.median(copied)
            speeds = f"{middle:.2f} | {best:.2f} | {copy:.2f} | {middle / copy:.0%}"
            print(f"| {step_mib} MiB | {TRANSFER_MIB} | {speeds} |", flush=True)


def _app(config: EngineConfig, chunk: int) -> serve.Application:
    router = {"request_router_class": EngineRouter}
    return serve.deployment(name="Prefill", request_router_config=router, max_ongoing_requests=100)(Source).bind(
        config, chunk
    )


def _measure(
    decoder: Decoder, name: str, num_tokens: int, rounds: int, source: Bytes, target: Bytes
) -> tuple[list[float], list[float]]:
    """GB/s of transfers and of copies, taking turns, so that a busy machine slows both."""
    decoder.fetch(name, num_tokens, LLAMA_8B)  # the handle finds its replica, and the store its pages
    fetched, copied = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        decoder.fetch(name, num_tokens, LLAMA_8B)
        fetched.append(source.nbytes / (time.perf_counter() - started) / 1e9)
        started = time.perf_counter()
        np.copyto(target, source)
        copied.append(source.nbytes / (time.perf_counter() - started) / 1e9)
    return fetched, copied
