"""The wire form of requests on the line between an ingress and an engine: positional msgpack arrays, no pickles.

Only numbers, strings, tuples and mappings travel, so whoever gets hold of the line can't make an engine run code.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from engine.request import EngineRequest, SamplingParams

_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_REQUEST = tuple(field.name for field in fields(EngineRequest) if field.name != "sampling")
_sampling_values = attrgetter(*_SAMPLING)
_request_values = attrgetter(*_REQUEST)


def pack_request(request: EngineRequest) -> tuple[Any, ...]:
    """What msgpack can carry of a request: all of it."""
    return (_request_values(request), _sampling_values(request.sampling))


def unpack_request(packed: tuple[Any, ...]) -> EngineRequest:
    """The request that `pack_request` was given."""
    values, sampling = packed
    return EngineRequest(
        **dict(zip(_REQUEST, values, strict=True)),
        sampling=SamplingParams(**dict(zip(_SAMPLING, sampling, strict=True))),
    )
