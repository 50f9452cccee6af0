"""RoutingPolicy: which of the replicas that are known gets a request; one class per option `routing_policy`."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from cluster.routing.fleet import Question
from cluster.routing.view import ReplicaView

REQUEST_TOKENS = 32
"""What a request that runs costs others, in tokens of prefill: it makes every step a little longer."""
IDLE_WEIGHT, BUSY_WEIGHT, BUSY_REQUESTS = 1.5, 2.0, 4
"""A token that is computed though it is cached elsewhere delays this request, and others at the replica: more of them
the more there are, up to so many. Were it the same everywhere, a replica that has nothing cached would get nothing,
ever, of prompts that all begin like earlier ones."""
MAX_IMBALANCE, SPARE_REQUESTS = 1.25, 4
"""A replica takes requests for what it has cached, or for a session, while it has less than so many times the average,
or so many more."""
SAMPLE = 16
"""Replicas compared by load, drawn at random where there are more. Routers with the same news then differ in choice."""
MAX_HOLDERS = 8
"""Replicas compared because they have the prompt's prefix."""


class RoutingPolicy(ABC):
    """Chooses; keeps no account of replicas, which is the Fleet's."""

    reads_prefixes = False  # whether Question.match is of use

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @abstractmethod
    def choose(self, question: Question, replicas: Sequence[ReplicaView]) -> str:
        """The name of one of `replicas`, of which there is at least one."""

    def _sample(self, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
        return list(replicas) if len(replicas) <= SAMPLE else self._rng.sample(replicas, SAMPLE)

    def _cheapest(self, replicas: Sequence[ReplicaView], cost: Callable[[ReplicaView], float]) -> str:
        """Of those that cost about the same, one at random."""
        costs = [cost(replica) for replica in replicas]
        limit = min(costs) + REQUEST_TOKENS / 2
        return self._rng.choice([replica.name for replica, c in zip(replicas, costs, strict=True) if c <= limit])


class RoundRobin(RoutingPolicy):
    """One after the other, whatever they do: to compare with."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._next = rng.randrange(1 << 30)  # routers begin at different ones

    def choose(self, question: Question, replicas: Sequence[ReplicaView]) -> str:  # noqa: ARG002
        self._next += 1
        return replicas[self._next % len(replicas)].name


class LeastLoaded(RoutingPolicy):
    """The replica with least to do."""

    def choose(self, question: Question, replicas: Sequence[ReplicaView]) -> str:
        return self._cheapest(self._sample(replicas), lambda replica: load(replica, question.now))


class LongestPrefix(RoutingPolicy):
    """The replica where the request's first token costs least: tokens that are queued there, and tokens of the request
    that are not cached there. Bounded, so that a popular prefix spreads over as many replicas as its load takes."""

    reads_prefixes = True

    def choose(self, question: Question, replicas: Sequence[ReplicaView]) -> str:
        candidates = self._sample(replicas)
        bounds = Bounds(question, candidates)
        candidates += self._holders(question, replicas, candidates)
        return self._cheapest(
            bounds.within(candidates) or candidates,
            lambda replica: load(replica, question.now) + delay(question, replica),
        )

    def _holders(
        self, question: Question, replicas: Sequence[ReplicaView], besides: Sequence[ReplicaView]
    ) -> list[ReplicaView]:
        """Some of the replicas that have most of the prompt, besides those that are compared anyway."""
        if len(besides) == len(replicas) or not question.match.holders:
            return []
        mask = question.match.holders[-1]
        known = {replica.name for replica in besides}
        holders = [replica for replica in replicas if mask & replica.bit and replica.name not in known]
        return holders if len(holders) <= MAX_HOLDERS else self._rng.sample(holders, MAX_HOLDERS)


class StickySessions(RoutingPolicy):
    """Requests of a session go to one replica, the same for every router, while its load is within bounds; else to the
    session's next one. All others go by another policy.

    Rendezvous hashing: when replicas come and go, only the sessions of those that did move.
    """

    def __init__(self, others: RoutingPolicy, rng: random.Random) -> None:
        super().__init__(rng)
        self._others = others
        self.reads_prefixes = others.reads_prefixes

    def choose(self, question: Question, replicas: Sequence[ReplicaView]) -> str:
        if not question.session:
            return self._others.choose(question, replicas)
        ranked = sorted(replicas, key=lambda replica: _rank(question.session, replica.name))
        within = Bounds(question, replicas).within(ranked)
        return (within or ranked)[0].name


class Bounds:
    """How much a replica may have to do and still be preferred for what it has."""

    def __init__(self, question: Question, replicas: Sequence[ReplicaView]) -> None:
        """`replicas` are those whose average counts."""
        self._question = question
        mean = sum(replica.requests(question.now) for replica in replicas) / len(replicas)
        self._max_requests = max(mean * MAX_IMBALANCE, mean + SPARE_REQUESTS)

    def within(self, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
        return [replica for replica in replicas if self._holds(replica)]

    def _holds(self, replica: ReplicaView) -> bool:
        question = self._question
        blocks = question.uncached_tokens(replica) / question.block_size + 1
        fits = replica.free_blocks(question.now, question.block_size) >= blocks
        return fits and replica.requests(question.now) < self._max_requests


def load(replica: ReplicaView, now: float) -> float:
    """What a replica has to do, in tokens of prefill."""
    return replica.queued_tokens(now) + REQUEST_TOKENS * replica.requests(now)


def delay(question: Question, replica: ReplicaView) -> float:
    """What the request's own prefill would cost, for itself and for others at the replica."""
    busy = min(1.0, replica.requests(question.now) / BUSY_REQUESTS)
    return question.uncached_tokens(replica) * (IDLE_WEIGHT + busy * (BUSY_WEIGHT - IDLE_WEIGHT))


POLICIES: Mapping[str, type[LongestPrefix | LeastLoaded | RoundRobin]] = {
    "prefix": LongestPrefix,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def create_policy(name: str, rng: random.Random, *, sticky_sessions: bool = False) -> RoutingPolicy:
    """The policy of an option's value: `prefix`, `least_loaded` or `round_robin`.

    Raises:
        KeyError: there is none of that name.
    """
    policy = POLICIES[name](rng)
    return StickySessions(policy, rng) if sticky_sessions else policy


def _rank(session: str, replica: str) -> bytes:
    return blake2b(f"{len(session)} {session} {replica}".encode(), digest_size=8).digest()
