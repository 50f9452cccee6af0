"""EngineReplica: what all Serve deployments around an engine have in common, whatever the replicas' role.

The engine runs on a thread of its own; Serve's event loop takes calls. A replica reports its start-up, its health and
its metrics; how requests come to it and where their outputs go is its role's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod

from ray import serve

from backends import create_backend
from cluster.client import Health
from cluster.gang.backend import GangBackend
from cluster.gang.ray_launcher import RayLauncher, worker_name
from cluster.logs import configure_logging
from cluster.metrics_ray import EXPORT_INTERVAL_S, RayMetricsExporter
from cluster.metrics_text import EngineReport, ReplicaLabels
from cluster.progress import ProgressReporter
from cluster.replica_metrics import merged
from cluster.roles import Role
from cluster.scaling_signals import SignalWindow
from engine.backend import Backend, BackendInfo
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import first_line
from engine.kv_connector import KVConnector
from engine.limits import Limits
from engine.metrics import MetricsSnapshot
from engine.news import CacheJournal
from engine.request import RequestOutput

logger = logging.getLogger(__name__)

EXPORT_WARNING_INTERVAL_S = 300.0


class EngineReplica(ABC):
    """A subclass sets up what its hooks need, then calls this constructor."""

    _journal: CacheJournal | None = None  # of roles whose `_emit` takes the engine's news

    def __init__(self, config: EngineConfig, log_level: str, role: Role) -> None:
        """Loads the model; returns when the engine can serve.

        Raises:
            Exception: it can't be loaded. Whoever waits for the replica has been told already.
        """
        configure_logging(log_level)
        context = serve.get_replica_context()
        self._labels = ReplicaLabels(
            model_name=config.model_name,
            application=context.app_name,
            replica=context.replica_id.unique_id,
            role=role.value,
        )
        self._closed = threading.Event()
        self._connector: KVConnector | None = None
        self._progress = ProgressReporter(context.app_name, self._labels.replica, role)
        with self._progress.reporting_errors():
            self._engine = self._load(config, log_level)
        self._engine.start()
        self._signals = SignalWindow(Limits.of(config, self._engine.info))
        threading.Thread(target=self._export_metrics, name="ray-metrics", daemon=True).start()
        self._progress.ready(_describe(config, self._engine.info))

    def _load(self, config: EngineConfig, log_level: str) -> EngineCore:
        backend = self._create_backend(config, log_level)
        try:
            self._connector = self._connect(config, backend)
            engine = EngineCore(config, backend, self._emit, self._connector, journal=self._journal)
            engine.load(self._progress)
        except Exception:
            with contextlib.suppress(Exception):  # half loaded; the error that counts is the first
                backend.close()
            raise
        self._attach(engine)
        return engine

    def _create_backend(self, config: EngineConfig, log_level: str) -> Backend:
        if config.num_hosts == 1:
            return create_backend(config)
        name = worker_name(self._labels.application, self._labels.replica)
        return GangBackend(config, RayLauncher(config, name=name, log_level=log_level))

    # -- the role's part

    @abstractmethod
    def _connect(self, config: EngineConfig, backend: Backend) -> KVConnector | None:
        """How KV comes to this replica and leaves it. The backend is not loaded yet."""

    @abstractmethod
    def _attach(self, engine: EngineCore) -> None:
        """The engine that requests go to."""

    @abstractmethod
    def _emit(self, outputs: list[RequestOutput]) -> None:
        """Takes a step's outputs on the engine's thread."""

    @abstractmethod
    def _fail_all(self, reason: str) -> None:
        """Ends the calls of all requests."""

    @abstractmethod
    def _close(self) -> None:
        """The engine has stopped."""

    # -- called through Serve

    async def info(self) -> BackendInfo:
        return self._engine.info

    async def health(self) -> Health:
        state = self._engine.health()
        return Health(healthy=state.healthy, reason=state.reason)

    async def report(self) -> EngineReport:
        return EngineReport(labels=self._labels, metrics=self._metrics())

    # -- called by Serve

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        state = self._engine.health()
        if not state.healthy:
            self._fail_all(state.reason)  # Serve replaces the replica only when its calls have ended
            raise RuntimeError(state.reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy goes by. Serve asks every second, where the number of replicas may change."""
        return self._signals.signals(self._engine.metrics(), time.monotonic()).to_stats()

    async def __del__(self) -> None:
        """Serve awaits this when the replica has drained. A replica that failed to load has nothing to stop."""
        if hasattr(self, "_engine"):
            self._closed.set()
            await asyncio.to_thread(self._engine.stop)  # a step may hang in it, and the last outputs need the loop
            self._close()
            self._progress.forget()

    # -- inside

    def _metrics(self) -> MetricsSnapshot:
        own = self._engine.metrics()
        return own if self._connector is None else merged(own, self._connector.metrics())

    def _export_metrics(self) -> None:
        exporter = RayMetricsExporter(self._labels.as_dict())
        warned_at = -EXPORT_WARNING_INTERVAL_S
        while not self._closed.wait(EXPORT_INTERVAL_S):
            try:
                exporter.export(self._metrics())
            except Exception as error:
                if time.monotonic() - warned_at >= EXPORT_WARNING_INTERVAL_S:
                    warned_at = time.monotonic()
                    logger.warning("metrics are not exported to Ray now: %s", first_line(error))


def _describe(config: EngineConfig, info: BackendInfo) -> str:
    cache_mib = info.num_blocks * info.bytes_per_block / 2**20
    return (
        f"{config.model_name} on {info.device}: {info.max_model_len} tokens of context, KV cache of {info.num_blocks} "
        f"blocks ({info.num_blocks * info.block_size} tokens, {cache_mib:.0f} MiB)"
    )
