"""EngineClient: how the HTTP side talks to engines, whatever carries the messages (Ray, or a thread in a test)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from engine.backend import BackendInfo
from engine.request import EngineRequest, RequestOutput


class EngineOverloadedError(RuntimeError):
    """The bounded queue is full: HTTP 429."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(RuntimeError):
    """No engine answers (starting, dead, draining): HTTP 503."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    healthy: bool
    reason: str = ""  # one line, when not healthy, or not fully
    degraded: bool = False  # it serves, with less than it should have


class EngineClient(Protocol):
    async def info(self) -> BackendInfo:
        """The loaded model's limits and capabilities (the same on every replica; cached).

        Raises:
            EngineUnavailableError: no replica is up.
        """
        ...

    def generate(self, request: EngineRequest, *, session: str = "") -> AsyncGenerator[RequestOutput, bool | None]:
        """Yields what each step brings until an output with a finish_reason. Closing the generator aborts the request;
        sending it True ends the request as one that has stopped by itself: its reader has all that it wanted.

        Args:
            session: requests of one session go to the same engine, if nothing speaks against it.

        Raises:
            EngineOverloadedError, InvalidRequestError: no engine took it (before any output).
            EngineUnavailableError: no engine took it, or its engine was lost and no other one went on with it.
        """
        ...

    async def health(self) -> Health: ...

    async def metrics_text(self) -> bytes:
        """The whole application's metrics in Prometheus text format, with replica labels."""
        ...
