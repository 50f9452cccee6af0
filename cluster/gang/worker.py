"""Worker: the actor on each host of a gang. Ray starts and places it; the leader commands it over the gang's line."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass

from backends import create_backend
from cluster import ray_compat
from cluster.gang.host import Host
from cluster.gang.wire import GangAddress
from cluster.logs import configure_logging
from engine.backend import HostPlace
from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProcess:
    """What the leader wants to know of a worker before it begins."""

    pid: int
    node_ip: str
    free_port: int  # for the coordinator, if this is rank 0


class Worker:
    def __init__(self, log_level: str) -> None:
        configure_logging(log_level)
        self._host: Host | None = None

    def describe(self) -> WorkerProcess:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return WorkerProcess(pid=os.getpid(), node_ip=ray_compat.node_ip(), free_port=port)

    def join(self, address: GangAddress, config: EngineConfig, place: HostPlace) -> None:
        """Connects to the leader; from now on its commands come over the line, and without it this process ends.

        Raises:
            OSError: the leader can't be reached.
        """
        self._host = Host(address, place.rank, create_backend(config, place), end_process)


def end_process() -> None:
    """At once: threads that hang in a collective, and JAX, which waits for its peers, have no say."""
    os.kill(os.getpid(), signal.SIGKILL)
