"""EngineServer: the Serve deployment that takes requests from ingresses. One replica is one engine.

Serve's event loop takes requests and posts what each step yields to the ingresses (one message per step and ingress).
`admit` stays open until its request ends, so that Serve's counts, back-pressure, cancellation, draining and death
detection see the request as long as it lives; the request itself comes ahead of that call, over the line from its
ingress (`Admissions`).
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.admissions import NEVER_CAME, Admissions
from cluster.connectors import create_connector
from cluster.engine_replica import EngineReplica
from cluster.messages import Refusal, RefusalKind, Ticket
from cluster.outbox import Outbox
from cluster.roles import Role
from cluster.sockets import LineAddress
from engine.backend import Backend
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_connector import KVConnector
from engine.news import CacheJournal
from engine.request import EngineRequest, RequestOutput


class EngineServer(EngineReplica):
    """What Serve runs; `cluster.app` gives it its deployment options."""

    def __init__(self, config: EngineConfig, log_level: str, prefill: DeploymentHandle[Any] | None = None) -> None:
        """Loads the model; returns when the engine can serve.

        Args:
            prefill: the replicas that compute long prompts for this one, if the application has any.

        Raises:
            Exception: it can't be loaded. Whoever waits for the replica has been told already.
        """
        self._prefill = prefill
        self._admissions = Admissions()
        self._journal = CacheJournal()
        self._outbox = Outbox(serve.get_replica_context().replica_id.unique_id, self._admissions)
        super().__init__(config, log_level, Role.UNIFIED if prefill is None else Role.DECODE)

    def _connect(self, config: EngineConfig, backend: Backend) -> KVConnector | None:
        return create_connector(config, self._labels, backend=backend, prefill=self._prefill)

    def _attach(self, engine: EngineCore) -> None:
        self._admissions.attach(engine)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        self._admissions.emit(outputs)

    def _fail_all(self, reason: str) -> None:
        self._admissions.fail_all(reason)

    def _close(self) -> None:
        self._outbox.close()

    # -- called by ingresses, through Serve

    async def open_line(self, address: LineAddress) -> None:
        """Opens the line to an ingress, before the first request from there needs it."""
        with contextlib.suppress(OSError, TimeoutError):  # the first request would hear of it
            await self._outbox.connect(address)

    async def admit(self, ticket: Ticket, request: EngineRequest | None) -> Refusal | None:
        """Holds a request's place. Returns when it has ended, or at once with the reason why it is not taken.

        Args:
            request: the request itself, unless it travels over the line.
        """
        if ticket.replica != self._labels.replica:
            return Refusal(kind=RefusalKind.MOVED, message="the engine that was chosen is gone; try again")
        if request is None:
            admission = await self._admissions.called(ticket.request_id)
            if admission is None:
                return Refusal(kind=RefusalKind.UNAVAILABLE, message=NEVER_CAME)
        else:
            try:
                connection = await self._outbox.connect(ticket.address)
            except (OSError, TimeoutError) as error:
                return _unreachable(ticket.address, error)
            admission = self._admissions.brought(request, ticket.stream, connection)
        return await self._admissions.hold(admission)


def _unreachable(address: LineAddress, error: Exception) -> Refusal:
    reason = str(error) or "timeout"
    message = f"the engine can't reach the ingress at {address.host} port {address.port}: {reason}"
    return Refusal(kind=RefusalKind.UNAVAILABLE, message=message)
