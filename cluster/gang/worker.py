"""Worker: the actor on each host of a gang. Ray starts and places it; the leader commands it over the gang's line."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from backends import create_backend
from cluster import ray_compat
from cluster.gang.host import Host
from cluster.gang.kv import GivenKV, KVSlice, ReadOut
from cluster.logs import configure_logging
from cluster.sockets import LineAddress
from engine.backend import HostPlace
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVPayload


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

    def join(self, address: LineAddress, config: EngineConfig, place: HostPlace) -> None:
        """Connects to the leader; from now on its commands come over the line, and without it this process ends.

        Raises:
            OSError: the leader can't be reached.
        """
        self._host = Host(address, place.rank, create_backend(config, place), end_process)

    # -- KV, which goes beside the line: between hosts, and to whoever asks

    def read_out(self, key: int, timeout_s: float) -> ReadOut:
        """See Host.read_out."""
        return self._joined.read_out(key, timeout_s)

    def collect(self, key: int, timeout_s: float) -> Sequence[KVBlocks]:
        """All of this host's share of KV that a command of the leader reads."""
        return self._joined.reads.get(key, timeout_s).result()

    def give(self, slices: Sequence[KVSlice], heads: range, *, with_checksum: bool) -> GivenKV:
        """See Host.give. The result is an object that the caller owns."""
        return GivenKV.of(self._joined.give(slices, heads), with_checksum=with_checksum)

    def receive(self, keys: Sequence[int], payloads: Sequence[KVPayload], timeout_s: float) -> None:
        """See Host.receive."""
        self._joined.receive(keys, payloads, timeout_s)

    @property
    def _joined(self) -> Host:
        if self._host is None:
            raise RuntimeError("this worker has no leader yet")
        return self._host


def end_process() -> None:
    """At once: threads that hang in a collective, and JAX, which waits for its peers, have no say."""
    os.kill(os.getpid(), signal.SIGKILL)
