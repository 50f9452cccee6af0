"""RayLauncher: a gang's processes are Ray actors, one per reserved seat, and end with their leader."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import ray_compat
from cluster.gang.kv import KVHost, ReadOut
from cluster.gang.launcher import Launcher
from cluster.gang.placement import TIMEOUT_S, Reservation, Seat, platform, reserve
from cluster.gang.ray_kv import WorkerHost
from cluster.gang.worker import Worker, WorkerProcess
from cluster.kv_objects import kv_error
from cluster.sockets import LineAddress
from engine.backend import BackendError, HostPlace, Progress
from engine.config import EngineConfig
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
THREADS = 32
"""Of an actor, for KV. More than there are who wait at a time: for KV that is being read (two readers of transfers, the
prefix store's writer), and for KV on its way here (a decode replica's receivers, two readers of the prefix store)."""


def worker_name(application: str, replica: str) -> str:
    """What Ray's dashboard shows of a replica's workers, with the rank behind it."""
    return f"sliceserve:{application}:{replica}:worker"


class RayLauncher(Launcher):
    def __init__(self, config: EngineConfig, *, name: str, log_level: str) -> None:
        """`name` with a rank behind it names an actor."""
        self.leader_host = ray_compat.node_ip()
        self._config = config
        self._name = name
        self._log_level = log_level
        self._lock = threading.Lock()
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []
        self._processes: list[psutil.Process] = []  # those of this machine

    @property
    def actors(self) -> list[Any]:
        """The workers in the order of ranks."""
        return self._actors

    def start(self, address: LineAddress, progress: Progress) -> None:
        # Ray's blocking calls want a thread without an event loop, and some of them have no deadline.
        pool = ThreadPoolExecutor(1, thread_name_prefix="gang-start")
        try:
            pool.submit(self._start, address, progress).result(TIMEOUT_S + 3 * START_TIMEOUT_S)
        except TimeoutError:
            raise BackendError("Ray did not start the worker processes of this engine; see its logs") from None
        finally:
            pool.shutdown(wait=False)

    def _start(self, address: LineAddress, progress: Progress) -> None:
        kind = platform(self._config)
        config = self._config.model_copy(update={"backend": kind})
        try:
            reservation = self._reservation = reserve(config, kind, progress)
            for seat in reservation.seats:
                self._actors.append(self._create(seat, reservation))
            first = self._describe(reservation)[0]
            coordinator = f"{first.node_ip}:{first.free_port}"
            places = [
                HostPlace(rank=seat.rank, num_hosts=config.num_hosts, coordinator=coordinator)
                for seat in reservation.seats
            ]
            joins = [a.join.remote(address, config, place) for a, place in zip(self._actors, places, strict=True)]
            ray.get(joins, timeout=START_TIMEOUT_S)
        except (ray.exceptions.RayError, psutil.Error, OSError) as error:
            raise BackendError(f"the worker processes of this engine do not start: {first_line(error)}") from error

    def _describe(self, reservation: Reservation) -> list[WorkerProcess]:
        found: list[WorkerProcess] = ray.get([a.describe.remote() for a in self._actors], timeout=START_TIMEOUT_S)
        here = ray.get_runtime_context().get_node_id()
        pids = [worker.pid for worker, seat in zip(found, reservation.seats, strict=True) if seat.node_id == here]
        self._processes = [psutil.Process(pid) for pid in pids]
        return found

    def _create(self, seat: Seat, reservation: Reservation) -> Any:
        resources = dict(reservation.resources)
        return (
            ray.remote(Worker)
            .options(
                name=f"{self._name}:{seat.rank}",
                num_cpus=resources.pop("CPU"),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=reservation.group, placement_group_bundle_index=seat.bundle
                ),
                runtime_env={"env_vars": dict(seat.environment)},
                max_concurrency=THREADS,
                max_restarts=0,
            )
            .remote(self._log_level)
        )

    # -- KV

    def read_out(self, key: int, timeout_s: float) -> Sequence[tuple[KVHost, ReadOut]]:
        actors = list(self._actors)
        reads: list[ReadOut] = self._answers([a.read_out.remote(key, timeout_s) for a in actors], timeout_s)
        return [(WorkerHost(actor), read) for actor, read in zip(actors, reads, strict=True)]

    def collect(self, key: int, timeout_s: float) -> Sequence[Sequence[KVBlocks]]:
        return self._answers([actor.collect.remote(key, timeout_s) for actor in self._actors], timeout_s)

    def _answers(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """All hosts' answers. Without Ray's blocking calls, as it has to be on any thread."""
        if not calls:
            raise BackendError("the hosts whose KV was read are gone")
        deadline = time.monotonic() + timeout_s
        try:
            return [call.future().result(max(0.0, deadline - time.monotonic())) for call in calls]
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = first_line(getattr(error, "cause", None) or error)  # of what a host has raised, that
            raise BackendError(f"KV could not be read from all hosts: {reason}") from error

    def deliver(
        self, keys: Sequence[int], by_host: Sequence[Sequence[KVPayload]], timeout_s: float
    ) -> Sequence[Future[None]]:
        actors = list(self._actors)
        if not actors:
            raise KVLostError("the hosts that KV is for are gone")
        return [
            _outcome(actor.receive.remote(list(keys), list(payloads), timeout_s))
            for actor, payloads in zip(actors, by_host, strict=True)
        ]

    def kill(self) -> None:
        with self._lock:
            actors, self._actors = self._actors, []
            processes, self._processes = self._processes, []
            reservation, self._reservation = self._reservation, None
        for process in processes:  # those that Ray could not end, such as while its control store is away, end now
            with contextlib.suppress(psutil.Error):
                process.kill()
        ends: list[Callable[[], object]] = [partial(ray.kill, actor) for actor in actors]
        if reservation is not None:
            ends.append(reservation.release)
        for end in ends:
            try:
                end()
            except ray.exceptions.RayError as error:
                logger.warning("Ray does not end a gang now, which its hosts notice: %s", first_line(error))


def _outcome(call: ray.ObjectRef[None]) -> Future[None]:
    """How a delivery ends, with errors as those of KV."""
    outcome: Future[None] = Future()

    def tell(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(kv_error(error))

    call.future().add_done_callback(tell)
    return outcome
