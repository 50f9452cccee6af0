"""Synthetic load: when requests come, how long they are, which prefixes they share, and which of them go on.

Token ids are single bytes: what matters about a prompt is which other prompts begin like it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from cluster.simulate.distributions import Distribution
from cluster.simulate.engine import SAMPLED

Arrival = Literal["poisson", "bursty", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request of the workload. `follow_up` gives the one that its client sends some time after the answer."""

    time_s: float  # since the beginning
    prompt: tuple[int, ...]
    output_tokens: int
    session: str = ""
    follow_up: Callable[[float], Job | None] | None = None  # of the time at which the answer was complete


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What synthetic requests are like."""

    rate: float  # conversations per second that begin; without turns, requests
    arrival: Arrival = "poisson"
    burstiness: float = 3.0  # coefficient of variation of the gaps, where they are bursty
    prompt_tokens: Distribution = field(default_factory=lambda: Distribution.parse("prompt_tokens", "512"))
    output_tokens: Distribution = field(default_factory=lambda: Distribution.parse("output_tokens", "128"))
    prefix_groups: int = 0  # 0: no shared prefixes
    prefix_tokens: int = 0  # that begin the prompts of a group, besides prompt_tokens
    prefix_skew: float = 0.0  # exponent of Zipf's law for the groups' popularity; 0: all alike
    turns: int = 1  # requests of a conversation
    think_s: float = 5.0  # mean time between an answer and the next turn
    max_tokens: int = 8192  # of a sequence: prompts and outputs are cut to it


class SyntheticWorkload:
    """An endless row of jobs; the same seed gives the same ones."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(f"workload {seed}")
        self._prefixes = [tuple(self._rng.randbytes(shape.prefix_tokens)) for _ in range(shape.prefix_groups)]
        popularity = [1 / (rank + 1) ** shape.prefix_skew for rank in range(shape.prefix_groups)]
        self._popularity = list(accumulate(popularity))

    def jobs(self) -> Iterator[Job]:
        for number, time_s in enumerate(self._arrivals()):
            yield self._job(time_s, self._prefix(), session=f"c{number}", turn=1)

    def _arrivals(self) -> Iterator[float]:
        shape, rng = self._shape, self._rng
        now = 0.0
        gap: Callable[[], float] = {
            "poisson": lambda: rng.expovariate(shape.rate),
            "bursty": lambda: rng.gammavariate(shape.burstiness**-2, shape.burstiness**2 / shape.rate),
            "constant": lambda: 1 / shape.rate,
        }[shape.arrival]
        while True:
            now += gap()
            yield now

    def _prefix(self) -> tuple[int, ...]:
        if not self._prefixes:
            return ()
        return self._rng.choices(self._prefixes, cum_weights=self._popularity)[0]

    def _job(self, time_s: float, history: tuple[int, ...], *, session: str, turn: int) -> Job:
        shape, rng = self._shape, self._rng
        room = shape.max_tokens - len(history) - 1
        asked = min(shape.prompt_tokens.draw(rng), max(1, room))
        prompt = (history + tuple(rng.randbytes(asked)))[: shape.max_tokens - 1]
        output = min(shape.output_tokens.draw(rng), shape.max_tokens - len(prompt))

        def follow_up(ended_s: float) -> Job | None:
            answered = prompt + (SAMPLED,) * output
            if len(answered) + 2 > shape.max_tokens:
                return None
            think_s = rng.expovariate(1 / shape.think_s) if shape.think_s else 0.0
            return self._job(ended_s + think_s, answered, session=session, turn=turn + 1)

        return Job(
            time_s=time_s,
            prompt=prompt,
            output_tokens=output,
            session=session,
            follow_up=follow_up if turn < shape.turns else None,
        )
