"""Pool: engine replicas of one role that start, drain, fail, and get requests from routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from cluster.balancer import Route
from cluster.continuation import Losses
from cluster.simulate.engine import SimulatedEngine
from cluster.simulate.models import EngineModel
from cluster.simulate.routing import Routers
from cluster.simulate.timeline import Timeline
from engine.core import QueueFullError
from engine.kv_connector import KVConnector
from engine.request import EngineRequest, RequestOutput

NEWS_INTERVAL_S = 1.0
"""A busy engine tells routers of its load so often at least, and when a request has its first token or has ended."""


DoneAt = Callable[[], float]
"""Says when an engine's device will have done all that it has been given."""


class Listener(Protocol):
    """Who hears what becomes of a pool's requests."""

    def yielded(self, replica: Replica, output: RequestOutput) -> None: ...

    def refused(self, request_id: str) -> None:
        """The engine that was chosen has a full queue, or the request has lost too many engines."""
        ...


class Phase(Enum):
    STARTING = auto()
    READY = auto()
    DRAINING = auto()  # gets no new requests, and goes when its last one has ended
    GONE = auto()


class Replica:
    __slots__ = ("began_at", "engine", "gone_at", "name", "phase", "ready_at")

    def __init__(self, name: str, engine: SimulatedEngine, now: float) -> None:
        self.name = name
        self.engine = engine
        self.phase = Phase.STARTING
        self.began_at = now
        self.ready_at = 0.0
        self.gone_at = 0.0

    def seconds_up(self, now: float) -> float:
        """How long it could serve, or could have."""
        return (self.gone_at or now) - self.ready_at if self.ready_at else 0.0

    def seconds_paid(self, now: float) -> float:
        """How long it has had its devices, or had."""
        return (self.gone_at or now) - self.began_at


@dataclass(slots=True)
class _Open:
    """A request at a replica, or on its way to one."""

    request: EngineRequest
    session: str
    name: str  # what its client knows it by: a resumed request has a name of its own
    route: Route | None = None
    has_begun: bool = False
    losses: Losses = field(default_factory=Losses)


class Pool:
    def __init__(
        self,
        name: str,
        model: EngineModel,
        timeline: Timeline,
        routers: Routers,
        listener: Listener,
        *,
        startup_s: float,
        connect: Callable[[DoneAt], KVConnector] | None = None,
        resumes: bool = True,
    ) -> None:
        """
        Args:
            connect: makes each engine's connector.
            resumes: whether the requests of a replica that fails go on elsewhere; else they are refused.
        """
        self.name = name
        self._connect = connect
        self._resumes = resumes
        self.model = model
        self.replicas: list[Replica] = []  # all there have ever been
        self.num_resumed = 0
        self.num_failures = 0
        self._timeline = timeline
        self._routers = routers
        self._listener = listener
        self._startup_s = startup_s
        self._ready: dict[str, Replica] = {}
        self._open: dict[str, _Open] = {}  # by the engine's request id
        self._parked: deque[_Open] = deque()  # no replica is ready
        self._target = 0

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_open(self) -> int:
        """Requests at engines, and those that wait for a replica."""
        return len(self._open) + len(self._parked)

    @property
    def target(self) -> int:
        """Replicas that are ready or starting."""
        return self._target

    @property
    def ready(self) -> Iterable[Replica]:
        return self._ready.values()

    # -- requests

    def submit(self, request: EngineRequest, session: str = "") -> None:
        self._send(_Open(request, session, request.request_id))

    def _send(self, open_: _Open) -> None:
        if not self._ready:
            self._parked.append(open_)
            return
        request = open_.request
        route = self._routers.route(request, open_.session, list(self._ready))
        try:
            self._ready[route.replica].engine.submit(request)
        except QueueFullError:
            route.balancer.end(route)
            self._listener.refused(open_.name)
            return
        open_.route = route
        self._open[request.request_id] = open_

    def _emitted(self, replica: Replica, outputs: list[RequestOutput]) -> None:
        now = self._timeline.now
        has_news = now >= replica.engine.coasts_until
        for output in outputs:
            open_ = self._open[output.request_id]
            route = open_.route
            assert route is not None
            if not open_.has_begun:
                open_.has_begun = has_news = True
                route.balancer.prefilled(route)
            if output.finish_reason is not None:
                has_news = True
                del self._open[output.request_id]
                route.balancer.end(route)
            self._listener.yielded(
                replica, output if output.request_id == open_.name else replace(output, request_id=open_.name)
            )
        if has_news:
            replica.engine.coasts_until = now + NEWS_INTERVAL_S
            self._routers.hear(replica.name, replica.engine.news())
        if replica.phase is Phase.DRAINING and not replica.engine.num_live:
            self._retire(replica)

    # -- replicas

    def scale_to(self, count: int, *, at_once: bool = False) -> None:
        """Starts replicas, or drains those with least to do. `at_once`: they are there from the beginning."""
        change = count - self._target
        self._target = count
        for _ in range(change):
            self._start(0.0 if at_once else self._startup_s)
        if change < 0:
            self._stop_some(-change)

    def fail(self, replica: Replica) -> None:
        """The replica is gone at once. Its requests go on elsewhere, and another one starts in its place."""
        if replica.phase not in (Phase.READY, Phase.DRAINING):
            return
        was_ready = replica.phase is Phase.READY
        requests = replica.engine.stop()
        self._retire(replica)
        self._routers.lost(replica.name)
        self.num_failures += 1
        if was_ready:
            self._start(self._startup_s)
        for request in requests:
            open_ = self._open.pop(request.request_id)
            if open_.route is not None:
                open_.route.balancer.end(open_.route)
            if not self._resumes or open_.losses.are_too_many(len(request.output_token_ids)):
                self._listener.refused(open_.name)
                continue
            self.num_resumed += 1
            open_.request = replace(request, request_id=f"{request.request_id}+")
            open_.has_begun = False
            self._send(open_)

    def _start(self, delay_s: float) -> None:
        name = f"{self.name}-{len(self.replicas)}"
        emit: Callable[[list[RequestOutput]], None] = lambda outputs: self._emitted(replica, outputs)  # noqa: E731
        engine = SimulatedEngine(
            self.model,
            self._timeline,
            emit,
            journal=self._routers.reads_news_of_caches,
            connector=None if self._connect is None else self._connect(lambda: engine.device_free_at),
        )
        replica = Replica(name, engine, self._timeline.now)
        self.replicas.append(replica)
        if delay_s:
            self._timeline.after(delay_s, lambda: self._is_up(replica))
        else:
            self._is_up(replica)

    def _is_up(self, replica: Replica) -> None:
        if replica.phase is not Phase.STARTING:  # it was not wanted any more
            return
        replica.phase = Phase.READY
        replica.ready_at = self._timeline.now
        self._ready[replica.name] = replica
        parked, self._parked = self._parked, deque()
        for open_ in parked:
            self._send(open_)

    def _stop_some(self, count: int) -> None:
        starting = [replica for replica in reversed(self.replicas) if replica.phase is Phase.STARTING]
        idlest = sorted(self._ready.values(), key=lambda replica: replica.engine.num_live)
        for replica in [*starting, *idlest][:count]:
            if replica.phase is Phase.READY and replica.engine.num_live:
                replica.phase = Phase.DRAINING
                del self._ready[replica.name]
            else:
                self._retire(replica)

    def _retire(self, replica: Replica) -> None:
        replica.phase = Phase.GONE
        replica.gone_at = self._timeline.now
        self._ready.pop(replica.name, None)
