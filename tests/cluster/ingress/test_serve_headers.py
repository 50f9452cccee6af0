"""Header values that Serve can't read never reach it, and everything else does."""

from __future__ import annotations

import httpx
import pytest
from ray.serve._private.http_util import RequestIdMiddleware, validate_http_proxy_callback_return
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from cluster.ingress.serve_headers import proxy_middlewares

SENT: list[tuple[bytes, bytes]] = [(b"accept", b"caf\xe9"), (b"user-agent", b"x" * 500)]


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the headers as Serve's proxy does, and answers with the request's id."""
    headers = {name.decode().replace("-", "_"): value for name, value in scope["headers"]}
    model, session = headers.get("serve_multiplexed_model_id", b""), headers.get("x_session_id", b"")
    read = {"id": headers["x_request_id"].decode(), "model": model.decode(), "session": session.decode()}
    others = all(header in scope["headers"] for header in SENT)
    await JSONResponse({**read, "others": others})(scope, receive, send)


async def answer(name: bytes, value: bytes) -> dict[str, object]:
    """What that application says, with Serve's own middleware inside of ours, as Serve nests them."""
    (ours,) = validate_http_proxy_callback_return(proxy_middlewares())
    app = ours.cls(RequestIdMiddleware(serve), *ours.args, **ours.kwargs)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        response = await client.get("/", headers=[*SENT, (name, value)])
    assert response.headers["x-request-id"] == response.json()["id"]
    return dict(response.json())


@pytest.mark.parametrize("value", [b"a\xffb", b"caf\xc3\xa9", b"a" * 129, b"", b"a\tb"])
async def test_a_request_id_that_is_not_short_printable_ascii_is_replaced(value: bytes) -> None:
    said = await answer(b"X-Request-ID", value)
    assert len(str(said["id"])) == 36
    assert said["others"]


@pytest.mark.parametrize("value", [b"a", b"my request/1", b"a" * 128])
async def test_a_good_request_id_is_kept(value: bytes) -> None:
    assert (await answer(b"X-Request-ID", value))["id"] == value.decode()


@pytest.mark.parametrize(
    "name", [b"serve_multiplexed_model_id", b"Serve-Multiplexed-Model-Id", b"x-session-id", b"X_Session_Id"]
)
async def test_other_headers_that_serve_reads_are_dropped_too(name: bytes) -> None:
    said = await answer(name, b"a\xffb")
    assert (said["model"], said["session"]) == ("", "")
