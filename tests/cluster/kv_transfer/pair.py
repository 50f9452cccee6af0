"""A prefill replica in this process, and a decode replica's way to it: everything between two engines but Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray

from cluster.gang.kv import GivenKV, KVHost, KVSlice
from cluster.gang.ray_kv import GivenPayload
from cluster.kv_transfer.decode_connector import DecodeConnector
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.prefill_connector import PrefillConnector
from cluster.kv_transfer.prefill_pool import PrefillError, PrefillPool
from cluster.kv_transfer.table import TransferTable
from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.messages import Refusal
from cluster.prefill_desk import PrefillDesk
from cluster.roles import Role
from engine.backend import Backend
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_blocks import KVPayload, LocalPayload
from engine.request import EngineRequest


class DeskPool(PrefillPool):
    """Calls a desk as Serve would."""

    def __init__(self, desk: PrefillDesk) -> None:
        self._desk = desk

    async def choose(self, request: EngineRequest, transfer: str) -> str:  # noqa: ARG002
        return "p"

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        answer = await self._desk.prefill(ticket, order)
        if isinstance(answer, Refusal):
            raise PrefillError("refused", answer.message)
        return answer

    async def fetch(
        self, ticket: TransferTicket, index: int, num_received: int, *, described: bool
    ) -> tuple[KVChunk | NoChunk, object]:
        chunk = await self._desk.fetch(ticket, index, num_received, described=described)
        return chunk, DeskHost(self._desk, ticket, asyncio.get_running_loop())

    def suspect(self, replica: str) -> bool:
        raise AssertionError(f"{replica} has done nothing wrong")

    def close(self, ticket: TransferTicket) -> None:
        self._desk.close(ticket)


class DeskHost(KVHost):
    """A prefill replica on one host, which a decode replica on several asks. Its KV goes into Ray's object store if
    there is a Ray, for decode's hosts are other processes then."""

    def __init__(self, desk: PrefillDesk, ticket: TransferTicket, loop: asyncio.AbstractEventLoop) -> None:
        self._desk = desk
        self._ticket = ticket
        self._loop = loop

    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:  # noqa: ARG002
        asked = self._desk.give(self._ticket, slices[0].key, heads)
        given = asyncio.run_coroutine_threadsafe(asked, self._loop).result(10)
        assert isinstance(given, GivenKV)
        return GivenPayload(ray.put(given)) if ray.is_initialized() else LocalPayload(blocks=given.shares)


class PrefillReplica:
    """
    Args:
        config: the prefill pool's (engine.pools.prefill_config).
    """

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self._transport = ObjectStoreTransport.of(config)
        max_bytes = config.kv_transfer_max_mib * MIB
        self.table = TransferTable(
            self._transport, TransferMetrics(Role.PREFILL), max_bytes=max_bytes, lease_s=config.kv_transfer_timeout_s
        )
        self._desk = PrefillDesk(self.table)
        self.engine = EngineCore(config, backend, self._desk.emit, PrefillConnector(self.table))
        self.engine.load()
        self.engine.start()
        self._desk.attach(self.engine)

    def connector(self, config: EngineConfig, backend: Backend) -> DecodeConnector:
        """Of a decode replica."""
        return DecodeConnector(
            "d",
            backend,
            lambda: DeskPool(self._desk),
            self._transport,
            PrefillThreshold(config.disagg_min_prefill_tokens),
            TransferMetrics(Role.DECODE),
            max_bytes=config.kv_transfer_max_mib * MIB,
            timeout_s=config.kv_transfer_timeout_s,
        )

    def stop(self) -> None:
        self.engine.stop()
        self.table.shut_down()
