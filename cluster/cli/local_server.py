"""One server on a private Ray: deploy, show progress until it is ready, wait, stop. Imports Ray: import it late."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO, TypeVar

from ray import serve
from ray.serve.config import HTTPOptions

from cluster import ray_compat
from cluster.app import APPLICATION
from cluster.cli.progress_bars import ProgressDisplay
from cluster.local_ray import LocalRay, LocalRayError, end_controller
from cluster.progress import read_progress
from cluster.ray_environment import DASHBOARD_HOST, Dashboard
from engine.errors import first_line

POLL_INTERVAL_S = 0.2
WATCH_INTERVAL_S = 3.0
ANSWER_TIMEOUT_S = 30.0
LOST_DEADLINE_S = 60.0
"""How long a server that was ready may be without an ingress (Serve replaces what dies) before it is given up."""
STILL_DEADLINE_S = 900.0
"""Longest time without any progress before start-up is given up."""


Answer = TypeVar("Answer")


class ServerError(RuntimeError):
    """The server can't start, or is gone. The message is one line for the user."""


class NoAnswerError(ServerError):
    """Ray does not answer."""


def serve_until_stopped(
    app: serve.Application, *, host: str, port: int, dashboard: Dashboard | None, folder: Path, output: TextIO
) -> int:
    """The server's whole life. Returns the exit code."""
    stop = threading.Event()
    _stop_on_signals(stop)
    ray: LocalRay | None = None
    ready = False
    try:
        ray = LocalRay(folder, dashboard_port=None if dashboard is None else dashboard.port)
        _stop_on_signals(stop)  # Ray has put handlers of its own
        _start_application(app, host, port, stop, output)
        ready = not stop.is_set()
        if ready:
            if dashboard is not None:
                where = _url(DASHBOARD_HOST, dashboard.port)
                print(f"Ray's dashboard is at {where}; it asks for the token in {dashboard.token_file}", file=output)
            print(f"ready at {_url(host, port)} (Ctrl-C stops it)", file=output, flush=True)
            _watch(stop)
    except (ServerError, LocalRayError) as error:
        print(f"error: {error}", file=output, flush=True)
        return 1
    finally:
        if ray is not None:
            if ready:
                print("stopping …", file=output, flush=True)
            ray.stop(APPLICATION if ready else None)
    return 0


def _start_application(app: serve.Application, host: str, port: int, stop: threading.Event, output: TextIO) -> None:
    """Deploys and waits, showing progress.

    Raises:
        ServerError: loading failed, or nothing moved for too long.
    """
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
        ray_compat.deploy(app, name=APPLICATION)
    except Exception as error:
        raise ServerError(f"Ray Serve does not start: {first_line(error)}") from error
    deadline = time.monotonic() + STILL_DEADLINE_S
    seen = None
    with ProgressDisplay(output) as display:
        while not stop.wait(POLL_INTERVAL_S):
            records = _asked(lambda: read_progress(APPLICATION))
            if records != seen:
                seen, deadline = records, time.monotonic() + STILL_DEADLINE_S
            for record in records:
                if record.error is not None:
                    raise ServerError(record.error)
                display.show(record)
            if _is_running():
                return
            if time.monotonic() > deadline:
                raise ServerError(f"nothing moved for {STILL_DEADLINE_S:.0f} s while starting; giving up")


def _is_running() -> bool:
    """Whether the application serves.

    Raises:
        ServerError: Serve has given up on it.
    """
    application = _asked(serve.status).applications.get(APPLICATION)
    if application is None:
        return False
    if application.status == "DEPLOY_FAILED":
        raise ServerError(f"deployment failed: {_last_line(application.message)}")
    return bool(application.status == "RUNNING")


def _stop_on_signals(stop: threading.Event) -> None:
    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def _watch(stop: threading.Event) -> None:
    """Returns when the server is to stop. Serve replaces replicas that die; what it can't mend ends the server.

    Raises:
        ServerError: Ray or the application is gone, or does not recover.
    """
    running_at = time.monotonic()
    while not stop.wait(WATCH_INTERVAL_S):
        try:
            application = _asked(serve.status).applications.get(APPLICATION)
        except NoAnswerError:
            if time.monotonic() - running_at > LOST_DEADLINE_S or not end_controller():
                raise
            continue  # Ray starts the next one, and replicas serve meanwhile
        if application is None:
            raise ServerError("the application was deleted")
        if application.status in ("RUNNING", "DEPLOYING"):
            running_at = time.monotonic()
        elif application.status == "DEPLOY_FAILED" or time.monotonic() - running_at > LOST_DEADLINE_S:
            raise ServerError(f"the server is {application.status}: {_last_line(application.message)}")


def _asked(question: Callable[[], Answer]) -> Answer:
    """What Ray answers.

    Raises:
        NoAnswerError: not in time, because something of it has died or hangs.
        ServerError: it says why not.
    """
    answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(question())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()  # Ray itself would wait for a dead head node for minutes
    try:
        answer = answers.get(timeout=ANSWER_TIMEOUT_S)
    except queue.Empty:
        message = f"Ray has not answered for {ANSWER_TIMEOUT_S:.0f} s; one of its processes died or hangs"
        raise NoAnswerError(message) from None
    if isinstance(answer, Exception):
        raise ServerError(f"Ray does not answer: {first_line(answer)}") from answer
    return answer


def _url(host: str, port: int) -> str:
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{port}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1].strip()
