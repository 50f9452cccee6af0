"""Balancer: the routing decisions of one process, from what it sends itself and, if it listens, from engines' news.

Serve's router may run on a thread of its own, while requests and news come and go on an event loop: a lock keeps them
apart. Nothing under it waits, and a decision takes a fraction of a millisecond.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from cluster.routing.fleet import ASSUMED_S, MAX_ASSUMED_BLOCKS, Fleet
from cluster.routing.policies import RoutingPolicy, create_policy
from cluster.routing.view import ReplicaView
from engine.config import EngineConfig
from engine.news import EngineLoad
from engine.request import EngineRequest

UNHEARD_ASSUMED_S = 600.0
"""How long a prompt counts as cached where it was sent, if no engine says what it has."""


class Route:
    """One request on its way to a replica: what the router looks at, and what became of it. Stays in its process."""

    __slots__ = ("balancer", "is_open", "is_prefilled", "replica", "request", "session", "suspects")

    def __init__(self, balancer: Balancer, request: EngineRequest, session: str, suspects: Collection[str]) -> None:
        self.balancer = balancer
        self.request = request
        self.session = session
        self.suspects = suspects
        self.replica = ""  # once it is chosen
        self.is_prefilled = False
        self.is_open = True


class Balancer:
    """Every Route that is begun must be ended. Thread-safe."""

    def __init__(self, policy: RoutingPolicy, fleet: Fleet) -> None:
        self._policy = policy
        self._fleet = fleet
        self._names: tuple[str, ...] = ()
        self._views: list[ReplicaView] = []  # of these names
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        hears_news: bool = True,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Balancer:
        """As the options of the replicas say.

        Args:
            hears_news: whether somebody passes engines' news on to this balancer. If not, it takes a prompt that it
                sent somewhere for cached there until as many others followed it as a cache holds, or for long.
        """
        policy = create_policy(config.routing_policy, rng or random.Random(), sticky_sessions=config.sticky_sessions)
        fleet = Fleet(
            block_size=config.block_size,
            prefixes=policy.reads_prefixes and config.enable_prefix_cache_hbm,
            assumed_s=ASSUMED_S if hears_news else UNHEARD_ASSUMED_S,
            max_assumed_blocks=config.num_blocks or MAX_ASSUMED_BLOCKS,
            clock=clock,
        )
        return cls(policy, fleet)

    @property
    def replicas(self) -> frozenset[str]:
        """Those that there were at the last choice."""
        return frozenset(self._names)

    @property
    def knows_caches(self) -> bool:
        """Whether it makes a difference to it what replicas have cached."""
        return self._fleet.prefixes

    # -- requests

    def begin(self, request: EngineRequest, *, session: str = "", suspects: Collection[str] = ()) -> Route:
        """A request that needs a replica.

        Args:
            suspects: replicas to take only if there is no other.
        """
        return Route(self, request, session, suspects)

    def choose(self, route: Route, names: Sequence[str], known: Mapping[str, int]) -> str:
        """Chooses one of these replicas, and counts the request as its own from now on.

        Args:
            known: open requests at each of them that others count; empty where nothing is known.
        """
        with self._lock:
            self._settle(route)
            self._meet(tuple(names))
            for view in self._views if known else ():
                view.known = known[view.name]
            trusted = [view for view in self._views if view.name not in route.suspects] if route.suspects else []
            question = self._fleet.ask(route.request, route.session)
            replica = self._policy.choose(question, trusted or self._views)
            if route.is_open:  # else its caller has given up meanwhile
                self._fleet.sent(replica, question)
                route.replica = replica
            return replica

    def prefilled(self, route: Route) -> None:
        """The request's first token has come."""
        if not route.is_prefilled:
            route.is_prefilled = True
            with self._lock:
                self._fleet.prefilled(route.replica, route.request.request_id)

    def end(self, route: Route) -> None:
        """The request has ended, or goes elsewhere."""
        with self._lock:
            route.is_open = False
            self._settle(route)

    def _meet(self, names: tuple[str, ...]) -> None:
        """Serve gives the same replicas in the same order until they change."""
        if names != self._names:
            self._names = names
            self._fleet.keep(names)
            self._views = self._fleet.views(names)

    def _settle(self, route: Route) -> None:
        if route.replica:
            self._fleet.ended(route.replica, route.request.request_id)
            route.replica = ""

    # -- news (a NewsReader)

    def load_is(self, replica: str, load: EngineLoad) -> None:
        with self._lock:
            self._fleet.load_is(replica, load)

    def cache_is(self, replica: str, hashes: Sequence[bytes]) -> None:
        with self._lock:
            self._fleet.cache_is(replica, hashes)

    def cache_changed(self, replica: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        with self._lock:
            self._fleet.cache_changed(replica, added, removed)

    def lost(self, replica: str) -> None:
        with self._lock:
            self._fleet.lost(replica)
