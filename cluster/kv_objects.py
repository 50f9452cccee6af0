"""KV that is an object of Ray's store: by its reference any process can fetch it, and has it in view without a copy."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayError

from engine.errors import first_line
from engine.kv_blocks import KVLateError, KVLostError


def fetched(source: ray.ObjectRef[Any], timeout_s: float) -> Any:
    """An object with KV, from whichever node has it.

    Raises:
        KVLostError: it is lost, or late (KVLateError).
    """
    try:
        return ray.get(source, timeout=timeout_s)
    except RayError as error:
        raise kv_error(error) from None


def kv_error(error: BaseException) -> KVLostError:
    """What it means for KV that something in Ray has failed. Always a new error, as one that is raised again from what
    holds it makes a cycle, in which KV would stay."""
    cause = getattr(error, "cause", None) or error  # of what a task has raised
    if isinstance(cause, KVLostError):
        return type(cause)(first_line(cause))
    if isinstance(error, ObjectLostError | ActorDiedError):
        return KVLostError(f"an object with KV is lost: {first_line(error)}")
    return KVLateError(f"an object with KV did not come: {first_line(error)}")
