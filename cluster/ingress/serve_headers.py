"""ServeHeaders: drops header values that Serve's proxy can't read, before it answers them with a 500 in plain text.

Serve decodes these headers ahead of any application. RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, set to
`cluster.ingress.serve_headers:proxy_middlewares`, is its one way to put something in front.
"""

from __future__ import annotations

import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

READ_BY_SERVE = frozenset(
    {
        b"serve-multiplexed-model-id",
        b"x-request-disconnect-disabled",
        b"x-request-id",
        b"x-request-timeout-seconds",
        b"x-session-id",
    }
)
GOOD_VALUE = re.compile(rb"[\x20-\x7e]{1,128}")


class ServeHeaders:
    """A request without those values is served as if the client had not sent them; its id is Serve's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["headers"] = [(name, value) for name, value in scope["headers"] if _is_readable(name, value)]
        await self._app(scope, receive, send)


def proxy_middlewares() -> list[Middleware]:
    """Called by Serve in each process that listens for HTTP."""
    return [Middleware(ServeHeaders)]


def _is_readable(name: bytes, value: bytes) -> bool:
    # Serve takes "_" for "-" in some of the names.
    return name.lower().replace(b"_", b"-") not in READ_BY_SERVE or GOOD_VALUE.fullmatch(value) is not None
