"""A gang whose hosts are threads of the test's process, around any backend: all of a gang but Ray and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.gang.host import Host
from cluster.gang.kv import KVHost, KVSlice, ReadOut
from cluster.gang.launcher import Launcher
from cluster.sockets import LineAddress
from engine.backend import Backend, Progress
from engine.kv_blocks import KVBlocks, KVPayload, RemotePayload


class LocalLauncher(Launcher):
    """Starts a Host for each backend; notes what becomes of them."""

    leader_host = "127.0.0.1"

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self.hosts: list[Host] = []
        self.released = [threading.Event() for _ in backends]  # by their leader
        self.killed = threading.Event()
        self.given: list[tuple[KVBlocks, ...]] = []  # what hosts were asked for
        self.num_collected = 0  # reads that came to the leader
        self._threads = ThreadPoolExecutor(8)

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

    def read_out(self, key: int, timeout_s: float) -> Sequence[tuple[KVHost, ReadOut]]:
        return [(LocalHost(host, self.given), host.read_out(key, timeout_s)) for host in self.hosts]

    def collect(self, key: int, timeout_s: float) -> Sequence[Sequence[KVBlocks]]:
        self.num_collected += 1
        return [host.reads.get(key, timeout_s).result() for host in self.hosts]

    def deliver(
        self, keys: Sequence[int], by_host: Sequence[Sequence[KVPayload]], timeout_s: float
    ) -> Sequence[Future[None]]:
        return [
            self._threads.submit(host.receive, keys, payloads, timeout_s)
            for host, payloads in zip(self.hosts, by_host, strict=True)
        ]

    def kill(self) -> None:
        self.killed.set()
        for host in self.hosts:
            host.hang_up()


class LocalHost(KVHost):
    """A host of this process. Notes what it is asked for when that is fetched."""

    def __init__(self, host: Host, given: list[tuple[KVBlocks, ...]]) -> None:
        self._host = host
        self._given = given

    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:  # noqa: ARG002
        return _LocalPayload(self._host, slices, heads, self._given)


class _LocalPayload(RemotePayload):
    def __init__(self, host: Host, slices: Sequence[KVSlice], heads: range, given: list[tuple[KVBlocks, ...]]) -> None:
        self._order = host, slices, heads
        self._given = given
        self._shares: tuple[KVBlocks, ...] | None = None
        self._lock = threading.Lock()

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:  # noqa: ARG002
        host, slices, heads = self._order
        with self._lock:
            if self._shares is None:
                self._shares = host.give(slices, heads)
                self._given.append(self._shares)
            return self._shares
