"""What breaks: processes that are killed, or that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable

import psutil

from tests.cluster.apps import num_running, replica_processes


async def eventually(condition: Callable[[], object], timeout_s: float) -> float:
    """Waits until the condition holds, without standing in the way of the streams; gives the seconds that took."""
    started = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - started < timeout_s, f"not so within {timeout_s} s"
        await asyncio.sleep(0.1)
    return time.monotonic() - started


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def engines(application: str) -> list[psutil.Process]:
    return replica_processes(application, "Engine")


def ingresses(application: str) -> list[psutil.Process]:
    return replica_processes(application, "Ingress")


def processes(title: str) -> list[psutil.Process]:
    """Those of this Ray, and of no other on the machine, whose command line begins so."""
    return [process for process in psutil.Process().children(recursive=True) if command(process).startswith(title)]


def command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


async def kill_engines(application: str, kills: int, source: random.Random, timeout_s: float) -> None:
    """Kills engines of three at random points; each as soon as two are running."""
    for _ in range(kills):
        await eventually(lambda: min(num_running(application, "Engine"), len(engines(application))) >= 2, timeout_s)
        await asyncio.sleep(source.uniform(0.0, 1.0))
        # Not one that starts: Serve pauses for longer and longer before it starts what failed to start.
        victims = sorted(await asyncio.to_thread(engines, application), key=lambda engine: engine.create_time())
        kill(source.choice(victims[:2]))


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
