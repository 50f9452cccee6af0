"""Routers: the real fleet and policy of each ingress, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.balancer import UNHEARD_ASSUMED_S
from cluster.routing.chain import SHORT_HASH_BYTES
from cluster.routing.fleet import ASSUMED_S, Fleet, Question
from cluster.routing.policies import RoutingPolicy, create_policy
from engine.news import EngineNews
from engine.request import EngineRequest


@dataclass(frozen=True, slots=True)
class _Router:
    fleet: Fleet
    policy: RoutingPolicy


class Routers:
    """One router per ingress. Each knows the requests that it sent itself; engines' news reach them all."""

    def __init__(
        self,
        policy: str,
        *,
        count: int,
        block_size: int,
        sticky_sessions: bool,
        caching: bool,
        hears_news: bool = True,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            count: ingresses, each with a router of its own.
            hears_news: whether engines tell these routers of their load and cache.
        """
        self._rng = rng
        self._routers: list[_Router] = []
        for _ in range(count):
            chooser = create_policy(policy, rng, sticky_sessions=sticky_sessions)
            prefixes = caching and chooser.reads_prefixes
            assumed_s = ASSUMED_S if hears_news else UNHEARD_ASSUMED_S
            fleet = Fleet(block_size=block_size, prefixes=prefixes, assumed_s=assumed_s, clock=clock)
            self._routers.append(_Router(fleet, chooser))
        self._hears_news = hears_news
        self.reads_news_of_caches = hears_news and caching and self._routers[0].policy.reads_prefixes

    def route(self, request: EngineRequest, session: str, replicas: Sequence[str]) -> Route:
        """Chooses a replica as one of the ingresses, and tells its fleet that the request has left."""
        router = self._routers[self._rng.randrange(len(self._routers))] if len(self._routers) > 1 else self._routers[0]
        fleet = router.fleet
        question: Question = fleet.ask(request, session)
        replica = router.policy.choose(question, fleet.views(replicas))
        fleet.sent(replica, question)
        return Route(fleet, replica, request.request_id)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forgets replicas that are gone."""
        names = list(replicas)
        for router in self._routers:
            router.fleet.keep(names)

    def lost(self, replica: str) -> None:
        for router in self._routers:
            router.fleet.lost(replica)

    def hear(self, replica: str, news: EngineNews) -> None:
        """News of an engine reach all ingresses at once."""
        if not self._hears_news:
            return
        added = [known[:SHORT_HASH_BYTES] for known, is_there in news.cache.items() if is_there]
        removed = [known[:SHORT_HASH_BYTES] for known, is_there in news.cache.items() if not is_there]
        for router in self._routers:
            router.fleet.load_is(replica, news.load)
            if news.cache:
                router.fleet.cache_changed(replica, added, removed)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request went, and who is to hear of its progress."""

    fleet: Fleet
    replica: str
    request_id: str

    def prefilled(self) -> None:
        self.fleet.prefilled(self.replica, self.request_id)

    def ended(self) -> None:
        self.fleet.ended(self.replica, self.request_id)
