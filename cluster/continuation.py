"""Continuation: one request across the engines that serve it, one after the other.

An engine that dies, hangs, drains or loses its line takes nothing with it that its ingress doesn't have: prompt,
parameters and the tokens that came. The next engine gets all of these and goes on behind the last token. As a token's
random key depends on the request's seed and the token's position only, and penalties and counts on the tokens so far,
the answer is the one that the first engine would have given.

Three things end it: time (an engine must take the request on within a limit), a request that seems to kill the engines
that take it, and a client that leaves, which closes the generator that all of this runs in.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from cluster.client import EngineUnavailableError
from cluster.messages import Refusal, RefusalKind
from engine.request import EngineRequest, RequestOutput

ADMISSION_TIMEOUT_S = 10.0
"""Longest search for an engine that takes a request for the first time."""
ATTEMPT_TIMEOUT_S = 5.0
"""Longest wait for the word of one engine that it has the request: it says so at once, with an empty output."""
DEATHS_AT_ONE_TOKEN = 3
"""Engines that may be lost to a request without a token in between: more look like the request's own doing."""
MAX_DEATHS = 10
"""Engines that may be lost to one request in all."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0


class Losses:
    """Engines that were lost to one request."""

    def __init__(self) -> None:
        self.count = 0
        self._count_here = 0  # without a token in between
        self._num_tokens = -1

    def are_too_many(self, num_tokens: int) -> bool:
        """Counts one more, with so many tokens there. True if the request is to be given up."""
        self.count += 1
        self._count_here = self._count_here + 1 if num_tokens == self._num_tokens else 1
        self._num_tokens = num_tokens
        return self._count_here >= DEATHS_AT_ONE_TOKEN or self.count >= MAX_DEATHS


@dataclass(slots=True)
class ResumptionCounts:
    """What has become of requests whose engine was lost."""

    resumed: int = 0  # times that another engine took one on
    given_up: int = 0


class Continuation:
    """What a request has yielded, what its next engine is asked, and whether there is to be a next one."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        resume_timeout_s: float,
        counts: ResumptionCounts,
        wake_timeout_s: float | None = None,
    ) -> None:
        """`wake_timeout_s`: where all engines may have been stopped, how long one may take to start."""
        self.request = request
        self._resume_timeout_s = resume_timeout_s
        self._counts = counts
        self._tokens: list[int] = []
        self._cached: int | None = None  # what the engine of the first token found in its cache
        self._attempts = 0
        self._tries = 0  # since the last engine that took it
        self._losses = Losses()
        self._held = False  # whether an engine has it now
        self._interrupted = False
        self._loss = ""  # how the last engine that had it was lost
        self.deadline = _now() + (ADMISSION_TIMEOUT_S if wake_timeout_s is None else wake_timeout_s)
        """By when an engine must have taken it."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def attempt_deadline(self) -> float:
        return min(self.deadline, _now() + ATTEMPT_TIMEOUT_S)

    def next_request(self) -> EngineRequest:
        """What the next engine is asked. A new name keeps late news of an earlier attempt apart."""
        self._attempts += 1
        if self._attempts == 1:
            return self.request
        return replace(
            self.request,
            request_id=f"{self.request.request_id}+{self._attempts}",
            output_token_ids=(*self.request.output_token_ids, *self._tokens),
        )

    def taken(self) -> None:
        """An engine has it."""
        self._held, self._tries = True, 0
        self._counts.resumed += self._interrupted

    def passed(self, output: RequestOutput) -> RequestOutput:
        """Notes an output on its way to the client. Cached tokens are those of the first engine that answered."""
        if output.token_ids:
            self._tokens.extend(output.token_ids)
        if self._cached is None:
            self._cached = output.num_cached_tokens
        elif output.num_cached_tokens != self._cached:
            output = replace(output, num_cached_tokens=self._cached)
        return output

    def interrupted(self, refusal: Refusal, *, last_resort: bool = False) -> float:
        """An engine was lost, or did not take the request. Returns after how many seconds to try the next one.

        Args:
            last_resort: this engine was known to be in trouble, but there was no other.

        Raises:
            EngineOverloadedError, EngineUnavailableError, InvalidRequestError: it is over.
        """
        if self._held:
            self._lost(refusal)
        elif not self._interrupted and (
            refusal.kind is RefusalKind.OVERLOADED or (last_resort and refusal.kind is RefusalKind.UNAVAILABLE)
        ):
            raise refusal.as_error()
        delay = self._backoff()
        if refusal.kind is RefusalKind.INVALID or _now() + delay >= self.deadline:
            raise self.give_up(refusal)
        return delay

    def give_up(self, refusal: Refusal) -> Exception:
        """The error that the client gets: no 429 for a request that had been taken."""
        if not self._interrupted:
            return refusal.as_error()
        self._counts.given_up += 1
        if refusal.kind is RefusalKind.INVALID:
            return refusal.as_error()
        why = "" if refusal.message == self._loss else f": {refusal.message}"
        limit = f"no other engine took the request over within {self._resume_timeout_s:g} s (resume_timeout_s)"
        return EngineUnavailableError(f"{self._loss}; {limit}{why}")

    def _lost(self, refusal: Refusal) -> None:
        """The engine that had it is lost: the clock for the next one starts."""
        self._held, self._interrupted, self._loss = False, True, refusal.message
        self.deadline = _now() + self._resume_timeout_s
        if refusal.kind is RefusalKind.MOVED:  # it drains, or was never quite there: nobody's death
            return
        if self._losses.are_too_many(len(self._tokens)):
            self._counts.given_up += 1
            message = f"{self._losses.count} engines failed while they served this request; the last one: {self._loss}"
            raise EngineUnavailableError(message)

    def _backoff(self) -> float:
        """Seconds to wait. They double, and half is random, so that a lost engine's streams don't come at once."""
        most = min(FIRST_BACKOFF_S * 2.0**self._tries, MAX_BACKOFF_S)
        self._tries = min(self._tries + 1, 16)
        return most * random.uniform(0.5, 1.0)


def _now() -> float:
    return asyncio.get_running_loop().time()
