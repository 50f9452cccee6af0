"""What an engine server says about its start-up, for whoever waits for it.

Before a replica is up no call reaches it, so it writes to the cluster's key-value store: one small record per replica,
overwritten at most a few times a second. `sliceserve serve` polls the records and draws bars; under `serve run` and in
Kubernetes the same steps are lines in the replica's log.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass

from cluster import ray_compat

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.2
LOG_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """Where one engine server is on its way to serving."""

    replica: str
    phase: str = ""
    done: int = 0
    total: int = 0
    detail: str = ""
    ready: bool = False
    error: str | None = None  # loading failed for good; one line


class ProgressReporter:
    """A Progress (engine.backend) that writes StartUp records and log lines."""

    def __init__(self, application: str, replica: str) -> None:
        self._key = f"{_prefix(application)}{replica}"
        self._replica = replica
        self._phase = ""
        self._last_put = self._last_log = 0.0

    def __call__(self, phase: str, done: int, total: int, detail: str = "") -> None:
        now = time.monotonic()
        edge = phase != self._phase or done >= total
        self._phase = phase
        if edge or now - self._last_log > LOG_INTERVAL_S:
            self._last_log = now
            logger.info("%s: %d of %d%s", phase, done, total, f" ({detail})" if detail else "")
        if edge or now - self._last_put > MIN_INTERVAL_S:
            self._last_put = now
            self._put(StartUp(replica=self._replica, phase=phase, done=done, total=total, detail=detail))

    def ready(self, detail: str) -> None:
        logger.info("ready: %s", detail)
        self._put(StartUp(replica=self._replica, ready=True, detail=detail))

    def failed(self, error: str) -> None:
        logger.error("%s", error)
        self._put(StartUp(replica=self._replica, error=error))

    def forget(self) -> None:
        ray_compat.kv_delete(self._key)

    def _put(self, record: StartUp) -> None:
        ray_compat.kv_put(self._key, json.dumps(asdict(record)).encode())


def read_progress(application: str) -> list[StartUp]:
    """The records of all replicas of an application that have started so far."""
    records = []
    for key in sorted(ray_compat.kv_keys(_prefix(application))):
        value = ray_compat.kv_get(key)
        if value is not None:
            records.append(StartUp(**json.loads(value)))
    return records


def _prefix(application: str) -> str:
    return f"start-up/{application}/"
