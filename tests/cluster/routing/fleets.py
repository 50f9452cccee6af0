"""Requests, and a fleet of replicas under a clock that only tests turn."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from cluster.routing.fleet import Fleet, Question
from cluster.routing.policies import RoutingPolicy, create_policy
from engine.kv_cache import block_hashes, root_hash
from engine.request import EngineRequest, SamplingParams

BLOCK = 16
_numbers = itertools.count()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Site:
    """A router, and the replicas that it knows by name."""

    def __init__(
        self, policy: str = "prefix", *names: str, sticky: bool = False, seed: int = 0, **fleet: float
    ) -> None:
        self.clock = Clock()
        self.names = list(names or "abcd")
        self.policy: RoutingPolicy = create_policy(policy, random.Random(seed), sticky_sessions=sticky)
        self.fleet = Fleet(block_size=BLOCK, clock=self.clock, prefixes=self.policy.reads_prefixes, **fleet)  # type: ignore[arg-type]
        self.open: list[tuple[str, str]] = []

    def ask(self, tokens: tuple[int, ...], session: str = "", salt: str = "") -> Question:
        sampling = SamplingParams(max_tokens=8)
        name = str(next(_numbers))
        request = EngineRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling, cache_salt=salt)
        return self.fleet.ask(request, session)

    def choose(self, tokens: tuple[int, ...], session: str = "", salt: str = "") -> str:
        return self.policy.choose(self.ask(tokens, session, salt), self.fleet.views(self.names))

    def send(self, tokens: tuple[int, ...], session: str = "") -> str:
        """Chooses, and keeps the request open there."""
        question = self.ask(tokens, session)
        replica = self.policy.choose(question, self.fleet.views(self.names))
        self.fleet.sent(replica, question)
        self.open.append((replica, question.request.request_id))
        return replica

    def end_first(self) -> None:
        replica, request_id = self.open.pop(0)
        self.fleet.prefilled(replica, request_id)
        self.fleet.ended(replica, request_id)

    def counts(self) -> dict[str, int]:
        """Open requests at each replica."""
        sent = Counter(replica for replica, _ in self.open)
        return {name: sent[name] for name in self.names}


def prompt(prefix: int, length: int = 4 * BLOCK, tail: int = 0) -> tuple[int, ...]:
    """Tokens of which the first `length` depend on `prefix` alone, followed by BLOCK that depend on `tail`."""
    first = random.Random(prefix)
    last = random.Random(-1 - tail)
    shared = tuple(first.randrange(30_000) for _ in range(length))
    return shared + tuple(last.randrange(30_000) for _ in range(BLOCK if tail else 1))


def hashes(tokens: tuple[int, ...], salt: str = "") -> list[bytes]:
    """Short hashes of all full blocks, as an engine reports them."""
    return [known_as[:8] for known_as in block_hashes(root_hash(cache_salt=salt), tokens, BLOCK)]
