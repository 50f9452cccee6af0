"""Reading bodies: nobody may take forever to send one, and large ones are read off the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from fastapi import Request
from starlette.types import Message

from cluster.ingress.body import read_body
from cluster.ingress.errors import ApiError, ClientDisconnectedError
from cluster.ingress.workers import INLINE_BYTES, Workers


def request(*messages: Message, pause_s: float = 0) -> Request:
    """A request whose body comes in these messages, then nothing."""
    left = list(messages)

    async def receive() -> Message:
        await asyncio.sleep(pause_s if left else 3600)
        return left.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def keep(body: dict[str, Any]) -> dict[str, Any]:
    return body


@pytest.mark.parametrize("pause_s", [0, 0.05])
async def test_a_body_that_trickles_or_never_ends_is_a_408(pause_s: float) -> None:
    slow = request(*[part(b" ")] * 100, pause_s=pause_s)
    with pytest.raises(ApiError, match=r"did not arrive within 0\.2 s") as raised:
        await asyncio.wait_for(read_body(slow, keep, Workers(), timeout_s=0.2), 5)
    assert raised.value.status == 408
    assert raised.value.body()["error"]["code"] == "body_timeout"
    assert raised.value.response().headers["connection"] == "close"


async def test_a_client_that_leaves_in_the_middle_is_no_error_of_ours() -> None:
    with pytest.raises(ClientDisconnectedError):
        await read_body(request(part(b"{"), {"type": "http.disconnect"}), keep, Workers())


@pytest.mark.parametrize(("padding", "inline"), [(0, True), (INLINE_BYTES, False)])
async def test_large_bodies_are_read_on_a_thread(padding: int, inline: bool) -> None:
    def thread(body: dict[str, Any]) -> int:
        assert body == {"a": 1}
        return threading.get_ident()

    body = await read_body(request(part(b'{"a":'), part(b"1}" + b" " * padding, more=False)), thread, Workers())
    assert (body.content == threading.get_ident()) == inline
    assert body.size == 7 + padding
