"""PrefillServer: the Serve deployment that computes prompts for decode replicas. One replica is one engine.

Three kinds of calls make a transfer (`cluster.kv_transfer`), and a fourth one if the decode replica has several hosts.
All name the replica that the first one chose.
"""

from __future__ import annotations

from cluster.connectors import create_connector
from cluster.engine_replica import EngineReplica
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.table import TransferTable
from cluster.messages import Refusal, RefusalKind
from cluster.prefill_desk import PrefillDesk
from cluster.roles import Role
from engine.backend import Backend
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_connector import KVConnector
from engine.request import RequestOutput


class PrefillServer(EngineReplica):
    """What Serve runs; `cluster.app` gives it its deployment options."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        """Loads the model; returns when the engine can serve.

        Raises:
            Exception: it can't be loaded. Whoever waits for the replica has been told already.
        """
        self._table = TransferTable(
            ObjectStoreTransport.of(config),
            TransferMetrics(Role.PREFILL),
            max_bytes=config.kv_transfer_max_mib * MIB,
            lease_s=config.kv_transfer_timeout_s,
        )
        self._desk = PrefillDesk(self._table)
        super().__init__(config, log_level, Role.PREFILL)

    def _connect(self, config: EngineConfig, backend: Backend) -> KVConnector | None:
        return create_connector(config, self._labels, backend=backend, transfers=self._table)

    def _attach(self, engine: EngineCore) -> None:
        self._desk.attach(engine)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        self._desk.emit(outputs)

    def _fail_all(self, reason: str) -> None:  # noqa: ARG002
        self._desk.fail_all()

    def _close(self) -> None:
        self._table.shut_down()

    # -- called by decode replicas, through Serve

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer | Refusal:
        """Computes a prompt, whose KV is fetched meanwhile."""
        return await self._desk.prefill(ticket, order) if self._is_mine(ticket) else MOVED

    async def fetch_kv(
        self, ticket: TransferTicket, index: int, num_received: int, described: bool
    ) -> KVChunk | NoChunk | Refusal:
        """A chunk of the prompt's KV, when it has been computed. The result is an object that the caller owns."""
        if not self._is_mine(ticket):
            return MOVED
        return await self._desk.fetch(ticket, index, num_received, described=described)

    async def give_kv(self, ticket: TransferTicket, index: int, heads: range) -> object:
        """Some heads of a chunk that was described. The result is an object that the caller owns."""
        return await self._desk.give(ticket, index, heads) if self._is_mine(ticket) else MOVED

    async def close_transfer(self, ticket: TransferTicket) -> None:
        """The decode replica needs nothing more."""
        if self._is_mine(ticket):
            self._desk.close(ticket)

    def _is_mine(self, ticket: TransferTicket) -> bool:
        return ticket.replica == self._labels.replica


MOVED = Refusal(kind=RefusalKind.MOVED, message="the prefill replica that was chosen is gone")
