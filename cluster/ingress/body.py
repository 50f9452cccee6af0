"""Reading a request's body: bounded, strictly JSON, validated by a protocol model, every refusal naming a field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from cluster.ingress.errors import ApiError, ClientDisconnectedError, invalid
from cluster.ingress.workers import Workers

MAX_BODY_BYTES = 16 << 20
MAX_VALUES = 1_000_000
MAX_CONTAINERS = 200_000
"""Of a body: its commas, and its brackets and braces, those in texts included. Parsing 16 MiB of either would hold up
everybody's streams for seconds, as the parser lets go of the interpreter only when it is done."""
TIMEOUT_S = 60.0
"""A body that trickles in for longer holds a connection for nothing."""
CLOSE = {"Connection": "close"}
SESSION_HEADER = "X-Session-ID"

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Body(Generic[T]):
    """What a body says, the bytes it took to say it, and the session that the request's header names."""

    content: T
    size: int
    session: str = ""


async def read_body(
    request: Request, parse: Callable[[dict[str, Any]], T], workers: Workers, *, timeout_s: float = TIMEOUT_S
) -> Body[T]:
    """The body, a JSON object, as `parse` reads it.

    Raises:
        ApiError: 408 when it takes longer than `timeout_s` to arrive, 413 when it is larger than MAX_BODY_BYTES,
            or holds too many values, 400 when it is not a JSON object in valid Unicode, or `parse` refuses it.
        ClientDisconnectedError: the client went away before its end.
    """
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request)
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {timeout_s:g} s", status=408, code="body_timeout", headers=CLOSE
        ) from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    content = await workers.run(len(raw), lambda: parse(parse_json(raw)))
    return Body(content=content, size=len(raw), session=request.headers.get(SESSION_HEADER, ""))


def parse_json(raw: bytes) -> dict[str, Any]:
    _refuse_masses(raw)
    try:
        # Not left to json.loads: of bytes it takes UTF-16 too, and halves of surrogate pairs.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_json") from None
    try:
        body = json.loads(text, parse_constant=_refuse_constant, parse_int=_whole)
    except RecursionError:
        raise ApiError("the body is not usable JSON: nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError('the body must be a JSON object, as in {"messages": [...]}', code="invalid_json")
    if b"\\u" in raw:
        for path, text in _strings(body, ""):
            _refuse_surrogates(path, text)
    return body


def validate(model: type[Model], body: dict[str, Any]) -> Model:
    """`body` as a `model`.

    Raises:
        ApiError: 400 naming the first wrong or unknown field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise invalid(_path(first["loc"]), _reason(first["type"], first["msg"])) from None


async def _read(request: Request) -> bytes:
    too_large = ApiError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413, code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _refuse_masses(raw: bytes) -> None:
    for what, count, most in (
        ("commas", raw.count(b","), MAX_VALUES),
        ("brackets and braces", raw.count(b"[") + raw.count(b"{"), MAX_CONTAINERS),
    ):
        if count > most:
            message = f"the body has {count} {what}; {most} is the most: send less in one request"
            raise ApiError(message, status=413, code="body_too_large")


def _whole(digits: str) -> int:
    """`int` as a Python function: calling one lets go of the GIL now and then, which a long list needs."""
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every string of a parsed body, keys included, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _strings(item, f"{path}.{key}" if path else key)


def _refuse_surrogates(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(path or None, "holds half of a surrogate pair, which is not valid Unicode") from None


def _path(location: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "content") as messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def _reason(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown parameter"
    if kind == "missing":
        return "required parameter is missing"
    message = message.removeprefix("Value error, ").replace("Input should be", "must be").replace("\n", " ")
    return message[:1].lower() + message[1:]
