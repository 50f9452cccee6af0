"""RayLauncher: a gang's processes are Ray actors, one per reserved seat, and end with their leader."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import ray_compat
from cluster.gang.backend import Launcher
from cluster.gang.kv import merged
from cluster.gang.placement import TIMEOUT_S, Reservation, Seat, platform, reserve
from cluster.gang.worker import Worker, WorkerProcess
from cluster.sockets import LineAddress
from engine.backend import BackendError, HostPlace, Progress
from engine.config import EngineConfig
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload

START_TIMEOUT_S = 120.0
KILL_AFTER_S = 0.5
"""Ray ends a process of this machine sooner, unless it is stopped."""
THREADS = 4
"""Of an actor: KV comes and goes while its leader commands it. More than there are at a time who wait for shares (two
readers of transfers, the prefix store's writer): what `receive` brings is what they may be waiting for."""


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

    def deliver(self, key: int, payload: KVPayload) -> None:
        try:
            kept = ray.put(payload)
        except ray.exceptions.RayError as error:
            raise KVLostError(f"KV can't be handed to the hosts: {first_line(error)}") from error
        for actor in self._actors:
            actor.receive.remote(key, kept)

    def collect(self, key: int, timeout_s: float) -> Sequence[KVBlocks]:
        futures = [actor.share.remote(key, timeout_s).future() for actor in self._actors]
        if not futures:
            raise BackendError("the hosts whose KV was read are gone")
        try:
            return merged([future.result(timeout_s) for future in futures])
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise BackendError(f"KV could not be read from all hosts: {first_line(error)}") from error

    def kill(self) -> None:
        with self._lock:
            actors, self._actors = self._actors, []
            processes, self._processes = self._processes, []
            reservation, self._reservation = self._reservation, None
        for actor in actors:
            ray.kill(actor)
        if reservation is not None:
            reservation.release()
        _, hanging = psutil.wait_procs(processes, timeout=KILL_AFTER_S)
        for process in hanging:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
