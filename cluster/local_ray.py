"""A Ray of our own on this machine, started and stopped with the server that needs it.

It must come up beside any other Ray (explicit local address, its own folder and ports, its own access token), whatever
an earlier one left behind, and be gone when the server stops: also the HAProxy, which Ray itself can leave orphaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from pathlib import Path

import psutil
import ray
from ray import serve

from cluster import ray_compat
from cluster.broadcast import broadcast
from cluster.ray_environment import DASHBOARD_HOST
from engine.errors import first_line

DRAIN_TIMEOUT_S = 5.0
"""So long requests that are open may take to end."""
DELETE_TIMEOUT_S = 3.0
POLL_INTERVAL_S = 0.1
LAST_ANSWER_TIMEOUT_S = 1.0
KILL_AFTER_S = 2.0


class LocalRayError(RuntimeError):
    """Ray does not start. The message is one line for the user."""


class LocalRay:
    """Starts on construction, in an environment that `ray_environment` has set; `stop` leaves no process behind."""

    def __init__(self, folder: Path, *, dashboard_port: int | None = None) -> None:
        """All files go under `folder`.

        Raises:
            LocalRayError: Ray does not start.
        """
        logs = folder / "session_latest" / "logs"
        try:
            ray_compat.init_private(
                str(folder),
                include_dashboard=dashboard_port is not None,
                dashboard_host=DASHBOARD_HOST,
                dashboard_port=dashboard_port,
                num_cpus=max(2, os.cpu_count() or 1),
                namespace="serve",
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except Exception as error:
            raise LocalRayError(f"Ray does not start: {first_line(error)} (its logs are in {logs})") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._children = _descendants()

    def stop(self, application: str | None = None) -> None:
        """Lets the application's requests end within a deadline, then ends Ray, then whatever is still alive."""
        self._children |= _descendants()
        if application is not None:
            _drain(application)
        self._children |= _descendants()
        ray.shutdown()
        _kill(self._children)


def end_controller() -> bool:
    """Ends Serve's controller, which hangs: Ray starts another one. False if there is none, or no Ray any more."""
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith("ray::ServeController"):
                process.kill()
                return True
    return False


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _drain(application: str) -> None:
    """Ends an application: its open requests first, within a while, then its replicas.

    On a thread, as Ray waits for a dead head node for minutes; and on one that asks nothing when the time is up: Ray
    ends a process that asks it something after its end, with exit code 1.
    """
    over = threading.Event()
    # A handle complains when the loop that it was used on ends.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)

    def drain() -> None:
        with contextlib.suppress(Exception):  # whatever it is, the processes are ended next
            asyncio.run(_let_requests_end(application))
            _close_port()
            ray_compat.begin_to_delete(application)
            while application in serve.status().applications and not over.wait(POLL_INTERVAL_S):
                pass

    draining = threading.Thread(target=drain, daemon=True)
    draining.start()
    draining.join(DRAIN_TIMEOUT_S + DELETE_TIMEOUT_S)
    over.set()
    draining.join(LAST_ANSWER_TIMEOUT_S)


async def _let_requests_end(application: str) -> None:
    """Lets no further request in, and waits for those that are open, while their time is not up."""
    ingress = serve.get_app_handle(application)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while sum((await broadcast(ingress, "close_door")).given):
                await asyncio.sleep(POLL_INTERVAL_S)


def _close_port() -> None:
    """Ends what takes HTTP requests: without its application it would answer 404, which means never again."""
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "haproxy":
                process.kill()
    ray_compat.end_proxies()


def _kill(processes: set[psutil.Process]) -> None:
    """Ends the processes that are still ours (psutil compares start times, so a reused id is left alone)."""
    _, alive = psutil.wait_procs(list(processes), timeout=KILL_AFTER_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=KILL_AFTER_S)
