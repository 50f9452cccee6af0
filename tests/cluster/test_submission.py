"""What engines say against a request is a refusal, and so is an engine that can't answer now."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.messages import Refusal, RefusalKind
from cluster.submission import submit
from engine.core import EngineHealth, EngineStoppedError, InvalidRequestError, QueueFullError
from engine.request import EngineRequest, SamplingParams

REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=1))


class Engine:
    def __init__(self, error: Exception | None = None, problem: str = "") -> None:
        self._error = error
        self._problem = problem
        self.requests: list[EngineRequest] = []

    def health(self) -> EngineHealth:
        return EngineHealth(healthy=not self._problem, reason=self._problem)

    def submit(self, request: EngineRequest) -> None:
        if self._error is not None:
            raise self._error
        self.requests.append(request)


@pytest.mark.parametrize(
    ("engine", "refusal"),
    [
        (None, Refusal(kind=RefusalKind.UNAVAILABLE, message="the engine is not loaded")),
        (Engine(problem="no step"), Refusal(kind=RefusalKind.UNAVAILABLE, message="no step")),
        (Engine(EngineStoppedError("stopped")), Refusal(kind=RefusalKind.UNAVAILABLE, message="stopped")),
        (Engine(QueueFullError("full")), Refusal(kind=RefusalKind.OVERLOADED, message="full")),
        (Engine(InvalidRequestError("seed", "no")), Refusal(kind=RefusalKind.INVALID, message="no", field="seed")),
    ],
)
def test_what_speaks_against_a_request_is_a_refusal(engine: Any, refusal: Refusal) -> None:
    assert submit(engine, REQUEST) == refusal
    assert engine is None or not engine.requests


def test_a_request_that_nothing_speaks_against_is_taken() -> None:
    engine: Any = Engine()
    assert submit(engine, REQUEST) is None
    assert engine.requests == [REQUEST]
