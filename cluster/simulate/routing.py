"""Routers: each ingress' own Balancer, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cluster.balancer import Balancer, Route
from cluster.routing.chain import shortened
from engine.config import EngineConfig
from engine.news import EngineNews
from engine.request import EngineRequest


class Routers:
    """One Balancer per ingress. Each knows the requests that it sent itself; engines' news reach them all."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        count: int,
        hears_news: bool = True,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            config: of the replicas.
            count: ingresses.
            hears_news: whether engines tell these routers of their load and cache.
        """
        self._rng = rng
        self._hears_news = hears_news
        self._balancers = [Balancer.of(config, hears_news=hears_news, rng=rng, clock=clock) for _ in range(count)]

    @property
    def reads_news_of_caches(self) -> bool:
        return self._hears_news and self._balancers[0].knows_caches

    def route(self, request: EngineRequest, session: str, replicas: Sequence[str]) -> Route:
        """Chooses a replica as one of the ingresses; the request has left for it."""
        balancers = self._balancers
        balancer = balancers[self._rng.randrange(len(balancers))] if len(balancers) > 1 else balancers[0]
        route = balancer.begin(request, session=session)
        balancer.choose(route, replicas, {})
        return route

    def lost(self, replica: str) -> None:
        for balancer in self._balancers:
            balancer.lost(replica)

    def hear(self, replica: str, news: EngineNews) -> None:
        """News of an engine reach all ingresses at once."""
        if not self._hears_news:
            return
        added, removed = shortened(news.cache)
        for balancer in self._balancers:
            balancer.load_is(replica, news.load)
            if news.cache:
                balancer.cache_changed(replica, added, removed)
