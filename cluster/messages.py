"""What an ingress and an engine server say to each other besides requests and tokens: tickets, and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.client import EngineOverloadedError, EngineUnavailableError
from cluster.sockets import LineAddress
from engine.validation import InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """The first argument of a Serve call that is for one replica. Another one that gets it must say MOVED."""

    replica: str  # the one that was chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket(Destination):
    """What a Serve call is for: to hold the place of one request at the replica that has it, or is to get it."""

    request_id: str
    stream: int  # the number under which the ingress knows the request
    address: LineAddress  # where the ingress takes tokens


class RefusalKind(StrEnum):
    OVERLOADED = "overloaded"  # the bounded queue is full
    INVALID = "invalid"  # the engine can't do what is asked
    UNAVAILABLE = "unavailable"  # the engine is gone, or can't reach the ingress
    MOVED = "moved"  # the call came to another replica than was chosen, as that one is gone: choose again


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why an engine did not take a request, or could not finish it. A value, not an exception: Serve logs those."""

    kind: RefusalKind
    message: str
    field: str | None = None  # INVALID: the parameter that is wrong
    retry_after_s: int = 1  # OVERLOADED

    def as_error(self) -> Exception:
        """The exception that EngineClient promises."""
        match self.kind:
            case RefusalKind.OVERLOADED:
                return EngineOverloadedError(self.message, retry_after_s=self.retry_after_s)
            case RefusalKind.INVALID:
                return InvalidRequestError(self.field or "", self.message)
            case RefusalKind.UNAVAILABLE | RefusalKind.MOVED:
                return EngineUnavailableError(self.message)
