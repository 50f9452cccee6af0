"""EngineServer: the Serve deployment around EngineCore. One replica is one engine.

The engine runs on a thread of its own; Serve's event loop takes requests, posts what each step yields to the
ingresses (one message per step and ingress), and answers control calls. `admit` stays open until its request ends, so
that Serve's counts, back-pressure, cancellation, draining and death detection see the request as long as it lives; the
request itself comes ahead of that call, over the line from its ingress (`Admissions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

from ray import serve

from backends import create_backend
from cluster.admissions import NEVER_CAME, Admissions
from cluster.client import Health
from cluster.logs import configure_logging
from cluster.mailbox import MailboxAddress
from cluster.messages import Refusal, RefusalKind, Ticket
from cluster.metrics_ray import EXPORT_INTERVAL_S, RayMetricsExporter
from cluster.metrics_text import EngineReport, ReplicaLabels
from cluster.outbox import Outbox
from cluster.progress import ProgressReporter
from engine.backend import BackendInfo
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import first_line
from engine.request import EngineRequest

logger = logging.getLogger(__name__)

EXPORT_WARNING_INTERVAL_S = 300.0


class EngineServer:
    """What Serve runs; `cluster.app` gives it its deployment options."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        """Loads the model; returns when the engine can serve.

        Raises:
            Exception: it can't be loaded. Whoever waits for the replica has been told already.
        """
        configure_logging(log_level)
        context = serve.get_replica_context()
        self._labels = ReplicaLabels(
            model_name=config.model_name, application=context.app_name, replica=context.replica_id.unique_id
        )
        self._admissions = Admissions()
        self._outbox = Outbox(self._labels.replica, self._admissions)
        self._closed = threading.Event()
        self._progress = ProgressReporter(context.app_name, self._labels.replica)
        with self._progress.reporting_errors():
            self._engine = self._load(config)
        self._admissions.attach(self._engine)
        self._engine.start()
        threading.Thread(target=self._export_metrics, name="ray-metrics", daemon=True).start()
        self._progress.ready(_describe(config, self._engine.info))

    def _load(self, config: EngineConfig) -> EngineCore:
        backend = create_backend(config)
        try:
            engine = EngineCore(config, backend, self._admissions.emit)
            engine.load(self._progress)
        except Exception:
            with contextlib.suppress(Exception):  # half loaded; the error that counts is the first
                backend.close()
            raise
        return engine

    # -- called by ingresses, through Serve

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
            admission = self._admissions.start(request, ticket.stream, connection)
        return await self._admissions.hold(admission)

    async def info(self) -> BackendInfo:
        return self._engine.info

    async def health(self) -> Health:
        state = self._engine.health()
        return Health(healthy=state.healthy, reason=state.reason)

    async def report(self) -> EngineReport:
        return EngineReport(labels=self._labels, metrics=self._engine.metrics())

    # -- called by Serve

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        state = self._engine.health()
        if not state.healthy:
            self._admissions.fail_all(state.reason)  # Serve replaces the replica only when its calls have ended
            raise RuntimeError(state.reason)

    async def __del__(self) -> None:
        """Serve awaits this when the replica has drained. A replica that failed to load has nothing to stop."""
        if hasattr(self, "_engine"):
            self._closed.set()
            await asyncio.to_thread(self._engine.stop)  # a step may hang in it, and the last outputs need the loop
            self._outbox.close()
            self._progress.forget()

    # -- inside

    def _export_metrics(self) -> None:
        tags = {
            "model_name": self._labels.model_name,
            "application": self._labels.application,
            "replica": self._labels.replica,
        }
        exporter = RayMetricsExporter(tags)
        warned_at = -EXPORT_WARNING_INTERVAL_S
        while not self._closed.wait(EXPORT_INTERVAL_S):
            try:
                exporter.export(self._engine.metrics())
            except Exception as error:
                if time.monotonic() - warned_at >= EXPORT_WARNING_INTERVAL_S:
                    warned_at = time.monotonic()
                    logger.warning("metrics are not exported to Ray now: %s", first_line(error))


def _unreachable(address: MailboxAddress, error: Exception) -> Refusal:
    reason = str(error) or "timeout"
    message = f"the engine can't reach the ingress at {address.host} port {address.port}: {reason}"
    return Refusal(kind=RefusalKind.UNAVAILABLE, message=message)


def _describe(config: EngineConfig, info: BackendInfo) -> str:
    cache_mib = info.num_blocks * info.bytes_per_block / 2**20
    return (
        f"{config.model_name} on {info.device}: {info.max_model_len} tokens of context, KV cache of {info.num_blocks} "
        f"blocks ({info.num_blocks * info.block_size} tokens, {cache_mib:.0f} MiB)"
    )
