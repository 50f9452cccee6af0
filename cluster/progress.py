"""What an engine server says about its start-up, for whoever waits for it.

Before a replica is up no call reaches it, so it writes to the cluster's key-value store: one small record per replica,
overwritten at most a few times a second. `sliceserve serve` polls the records and draws bars; under `serve run` and in
Kubernetes the same steps are lines in the replica's log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from cluster import ray_compat
from cluster.roles import Role
from engine.backend import BackendError
from engine.config import ConfigError
from engine.errors import first_line

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.2
LOG_INTERVAL_S = 5.0
STALE_AFTER_S = 600.0
"""Records this old are nobody's: whoever waited has read them, or their replica was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """Where one engine server is on its way to serving."""

    replica: str
    role: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    detail: str = ""
    ready: bool = False
    error: str | None = None  # loading failed for good; one line
    written_at: float = 0.0  # seconds since the epoch


class StartUpError(RuntimeError):
    """A replica can't start. The message is one line; Serve shows it, at the end of its own, in `serve status`."""


class ProgressReporter:
    """A Progress (engine.backend) that writes StartUp records and log lines."""

    def __init__(self, application: str, replica: str, role: Role | None) -> None:
        """Where there is more than one role, phases and errors begin with this replica's. An ingress has none."""
        self._application = application
        self._label = "" if role in (None, Role.UNIFIED) else f"{role}: "
        self._key = f"{_prefix(application)}{replica}"
        self._record = StartUp(replica=replica, role=role or "")
        self._phase = ""
        self._last_put = self._last_log = 0.0
        _forget_stale(application)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Around loading: whatever it raises is reported in one line, and goes on to Serve.

        Raises:
            StartUpError: in place of an error that a user can act on, so that the way to it takes no room in statuses.
        """
        try:
            yield
        except (BackendError, ConfigError) as error:
            line = first_line(error)
            self.failed(line)
            raise StartUpError(line) from None
        except Exception as error:  # out of memory, a fault of a hardware library, a bug
            logger.exception("loading failed")
            detail = first_line(error)
            name = type(error).__name__
            self.failed(f"internal error: {name}" if detail == name else f"internal error: {name}: {detail}")
            raise

    def __call__(self, phase: str, done: int, total: int, detail: str = "") -> None:
        phase = self._label + phase
        now = time.monotonic()
        edge = phase != self._phase or done >= total
        self._phase = phase
        if edge or now - self._last_log > LOG_INTERVAL_S:
            self._last_log = now
            logger.info("%s: %d of %d%s", phase, done, total, f" ({detail})" if detail else "")
        if edge or now - self._last_put > MIN_INTERVAL_S:
            self._last_put = now
            self._put(replace(self._record, phase=phase, done=done, total=total, detail=detail))

    def ready(self, detail: str) -> None:
        logger.info("ready: %s", detail)
        for key, record in _read(self._application):
            if record.error is not None and record.role == self._record.role:
                ray_compat.kv_delete(key)  # what was wrong is not any more, also when this replica has gone
        self._put(replace(self._record, ready=True, detail=self._label + detail))

    def failed(self, error: str) -> None:
        logger.error("%s", error)
        self._put(replace(self._record, error=self._label + error))

    def forget(self) -> None:
        ray_compat.kv_delete(self._key)

    def _put(self, record: StartUp) -> None:
        ray_compat.kv_put(self._key, json.dumps(asdict(replace(record, written_at=time.time()))).encode())


def read_progress(application: str) -> list[StartUp]:
    """The records of all replicas of an application that have started so far."""
    return [record for _, record in _read(application)]


def last_failure(application: str) -> str | None:
    """Why the replica that was the last to start, of those that take requests, could not; None if it could, or tries.

    Asks Ray's control store, which may take long.
    """
    records = [record for record in read_progress(application) if record.role in (Role.UNIFIED, Role.DECODE)]
    return max(records, key=lambda record: record.written_at).error if records else None


def _read(application: str) -> list[tuple[str, StartUp]]:
    records = []
    for key in sorted(ray_compat.kv_keys(_prefix(application))):
        value = ray_compat.kv_get(key)
        if value is not None:
            records.append((key, StartUp(**json.loads(value))))
    return records


def _forget_stale(application: str) -> None:
    for key, record in _read(application):
        if time.time() - record.written_at > STALE_AFTER_S:
            ray_compat.kv_delete(key)


def _prefix(application: str) -> str:
    return f"start-up/{application}/"
