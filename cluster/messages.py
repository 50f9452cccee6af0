"""What an engine server answers to an ingress, besides tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.client import EngineOverloadedError, EngineUnavailableError
from engine.validation import InvalidRequestError


class RefusalKind(StrEnum):
    OVERLOADED = "overloaded"  # the bounded queue is full
    INVALID = "invalid"  # the engine can't do what is asked
    UNAVAILABLE = "unavailable"  # the engine is gone, or can't reach the ingress


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
            case RefusalKind.UNAVAILABLE:
                return EngineUnavailableError(self.message)
