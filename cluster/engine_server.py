"""EngineServer: the Serve deployment around EngineCore. One replica is one engine.

The engine runs on a thread of its own; Serve's event loop admits requests, posts what each step yields to the
ingresses (one message per step and ingress), and answers control calls. `admit` stays open until its request ends, so
that Serve's counts, back-pressure, cancellation, draining and death detection see the request as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from ray import serve

from backends import create_backend
from cluster.client import Health
from cluster.logs import configure_logging
from cluster.mailbox import Connection, MailboxAddress, Outbox
from cluster.messages import Refusal, RefusalKind
from cluster.metrics_ray import EXPORT_INTERVAL_S, RayMetricsExporter
from cluster.metrics_text import EngineReport, ReplicaLabels
from cluster.progress import ProgressReporter
from engine.backend import BackendInfo
from engine.config import EngineConfig
from engine.core import EngineCore, EngineStoppedError, InvalidRequestError, QueueFullError
from engine.errors import first_line
from engine.request import EngineRequest, FinishReason, RequestOutput

logger = logging.getLogger(__name__)

EXPORT_WARNING_INTERVAL_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Admission:
    """A request that the engine has."""

    stream: int
    connection: Connection
    ended: asyncio.Future[bool]  # True: the engine ended it; False: nobody reads it any more


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
        self._admissions: dict[str, _Admission] = {}
        self._outbox = Outbox(self._ingress_lost)
        self._loop: asyncio.AbstractEventLoop | None = None  # known from the first request on
        self._closed = threading.Event()
        self._progress = ProgressReporter(context.app_name, self._labels.replica)
        with self._progress.reporting_errors():
            self._engine = self._load(config)
        self._engine.start()
        threading.Thread(target=self._export_metrics, name="ray-metrics", daemon=True).start()
        self._progress.ready(_describe(config, self._engine.info))

    def _load(self, config: EngineConfig) -> EngineCore:
        backend = create_backend(config)
        try:
            engine = EngineCore(config, backend, self._emit)
            engine.load(self._progress)
        except Exception:
            with contextlib.suppress(Exception):  # half loaded; the error that counts is the first
                backend.close()
            raise
        return engine

    # -- called by ingresses, through Serve

    async def admit(self, request: EngineRequest, stream: int, address: MailboxAddress) -> Refusal | None:
        """Runs a request. Returns when it has ended, or at once with the reason why it is not taken.

        Args:
            stream: the number under which the ingress knows the request.
            address: where the ingress takes tokens.
        """
        try:
            connection = await self._outbox.connect(address)
        except (OSError, TimeoutError) as error:
            reason = str(error) or "timeout"
            message = f"the engine can't reach the ingress at {address.host} port {address.port}: {reason}"
            return Refusal(kind=RefusalKind.UNAVAILABLE, message=message)
        self._loop = asyncio.get_running_loop()
        admission = _Admission(stream=stream, connection=connection, ended=self._loop.create_future())
        refusal = self._submit(request)
        if refusal is not None:
            return refusal
        self._admissions[request.request_id] = admission
        connection.post([(stream, RequestOutput(request_id=request.request_id))])  # tells the ingress: admitted
        ended = False
        try:
            ended = await admission.ended
        finally:
            del self._admissions[request.request_id]
            if not ended:
                self._engine.abort(request.request_id)
        return None

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
            self._give_up(state.reason)
            raise RuntimeError(state.reason)

    async def __del__(self) -> None:
        """Serve awaits this when the replica has drained. A replica that failed to load has nothing to stop."""
        if hasattr(self, "_engine"):
            self._closed.set()
            await asyncio.to_thread(self._engine.stop)  # a step may hang in it, and the last outputs need the loop
            self._outbox.close()
            self._progress.forget()

    # -- inside

    def _submit(self, request: EngineRequest) -> Refusal | None:
        try:
            self._engine.submit(request)
        except InvalidRequestError as error:
            return Refusal(kind=RefusalKind.INVALID, message=str(error), field=error.field)
        except QueueFullError as error:
            return Refusal(kind=RefusalKind.OVERLOADED, message=str(error))
        except EngineStoppedError as error:
            return Refusal(kind=RefusalKind.UNAVAILABLE, message=str(error))
        return None

    def _emit(self, outputs: list[RequestOutput]) -> None:
        """Called on the engine's thread, once per step."""
        assert self._loop is not None  # outputs come from requests only
        self._loop.call_soon_threadsafe(self._post, outputs)

    def _post(self, outputs: list[RequestOutput]) -> None:
        """Sends a step's outputs to their ingresses. Outputs of requests that were given up are dropped."""
        per_ingress: defaultdict[Connection, list[tuple[int, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            admission = self._admissions.get(output.request_id)
            if admission is None:
                continue
            per_ingress[admission.connection].append((admission.stream, output))
            if output.finish_reason is not None and not admission.ended.done():
                admission.ended.set_result(True)
        for connection, rows in per_ingress.items():
            connection.post(rows)

    def _give_up(self, reason: str) -> None:
        """Ends all requests with an error: Serve replaces the replica, but not before their calls have ended."""
        for request_id, admission in self._admissions.items():
            if not admission.ended.done():
                error = RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)
                admission.connection.post([(admission.stream, error)])
                admission.ended.set_result(True)

    def _ingress_lost(self, connection: Connection) -> None:
        """Nobody reads these requests any more."""
        for admission in self._admissions.values():
            if admission.connection is connection and not admission.ended.done():
                admission.ended.set_result(False)

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


def _describe(config: EngineConfig, info: BackendInfo) -> str:
    cache_mib = info.num_blocks * info.bytes_per_block / 2**20
    return (
        f"{config.model_name} on {info.device}: {info.max_model_len} tokens of context, KV cache of {info.num_blocks} "
        f"blocks ({info.num_blocks * info.block_size} tokens, {cache_mib:.0f} MiB)"
    )
