"""A gang whose hosts are threads of the test's process, around any backend: all of a gang but Ray and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cluster.gang.backend import Launcher
from cluster.gang.host import Host
from cluster.gang.kv import merged
from cluster.sockets import LineAddress
from engine.backend import Backend, Progress
from engine.kv_blocks import KVBlocks, KVPayload


class LocalLauncher(Launcher):
    """Starts a Host for each backend; notes what becomes of them."""

    leader_host = "127.0.0.1"

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self.hosts: list[Host] = []
        self.released = [threading.Event() for _ in backends]  # by their leader
        self.killed = threading.Event()

    def start(self, address: LineAddress, progress: Progress) -> None:
        progress("placing hosts", len(self._backends), len(self._backends), "threads")
        for rank, backend in enumerate(self._backends):
            self.hosts.append(Host(address, rank, backend, self._end(rank)))

    def _end(self, rank: int) -> Callable[[], None]:
        def end() -> None:
            self.released[rank].set()
            if self.hosts[rank:]:
                self.hosts[rank].hang_up()

        return end

    def deliver(self, key: int, payload: KVPayload) -> None:
        for host in self.hosts:
            host.payloads.put(key, payload)

    def collect(self, key: int, timeout_s: float) -> Sequence[KVBlocks]:
        return merged([host.shares.take(key, timeout_s).result() for host in self.hosts])

    def kill(self) -> None:
        self.killed.set()
        for host in self.hosts:
            host.hang_up()
