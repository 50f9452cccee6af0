"""How a replica gives a request to its engine: what the engine says against it is a Refusal, whoever asked."""

from __future__ import annotations

from cluster.messages import Refusal, RefusalKind
from engine.core import EngineCore, EngineStoppedError, InvalidRequestError, QueueFullError
from engine.request import EngineRequest


def submit(engine: EngineCore | None, request: EngineRequest) -> Refusal | None:
    """Gives a request to an engine; None if it has taken it. Any thread."""
    try:
        if engine is None:
            raise EngineStoppedError("the engine is not loaded")
        state = engine.health()
        if not state.healthy:  # it would wait there until the replica is replaced; another one may do better
            raise EngineStoppedError(state.reason)
        engine.submit(request)
    except InvalidRequestError as error:
        return Refusal(kind=RefusalKind.INVALID, message=str(error), field=error.field)
    except QueueFullError as error:
        return Refusal(kind=RefusalKind.OVERLOADED, message=str(error))
    except EngineStoppedError as error:
        return Refusal(kind=RefusalKind.UNAVAILABLE, message=str(error))
    return None
