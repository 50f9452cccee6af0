"""What goes wrong with a request, as OpenAI clients expect to read it.

Every error leaves as `{"error": {"message", "type", "param", "code"}}` with a fitting status: 400 names the parameter,
404 the model or route, 429 says when to come back, 503 means no engine, 500 is one line. A traceback stays in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from cluster.client import EngineOverloadedError, EngineUnavailableError
from engine.validation import InvalidRequestError

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client went away: nobody reads it, access logs do."""
RETRY_AFTER_S = "5"
"""When to come back to a server that has no engine: about the time that starting one takes at least."""
MAX_NAME = 120
MAX_MESSAGE = 1000
"""Longest parameter name and message of an error, in characters: clients choose much of what they quote."""


def shortened(text: str, most: int) -> str:
    """At most `most` characters of a text, its beginning and its end."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]}…{text[head + 1 - most :]}"


class ApiError(Exception):
    """A request that gets no (or no further) answer. The message is one line for the person who sent it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = shortened(message.replace("\r", "\\r").replace("\n", "\\n"), MAX_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.kind = kind
        self.param = None if param is None else shortened(param, MAX_NAME)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class ClientDisconnectedError(Exception):
    """The client closed its connection; whatever it asked for is aborted."""


def invalid(param: str | None, message: str) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(f"{shortened(param, MAX_NAME)}: {message}" if param else message, param=param, code="invalid_value")


def to_api_error(error: BaseException) -> ApiError:
    """Turns what the engine's client raised into what the HTTP client reads."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineOverloadedError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(str(error), status=429, kind="rate_limit_error", code="engine_overloaded", headers=headers)
    if isinstance(error, EngineUnavailableError):
        headers = {"Retry-After": RETRY_AFTER_S}
        return ApiError(str(error), status=503, kind="service_unavailable_error", code="no_engine", headers=headers)
    if isinstance(error, TimeoutError):
        return ApiError(
            "the request took longer than request_timeout_s", status=504, kind="server_error", code="timeout"
        )
    logger.error("request failed", exc_info=error)
    return ApiError("internal error; the server's log has the details", status=500, kind="server_error")


def stopping() -> ApiError:
    """The server takes no further requests; another one, or the next one here, will."""
    headers = {"Retry-After": RETRY_AFTER_S}
    message = "the server is stopping; try again"
    return ApiError(message, status=503, kind="service_unavailable_error", code="stopping", headers=headers)


def engine_failed(reason: str | None) -> ApiError:
    """The engine died or stopped, which ends all of its requests: another one, or itself again, will answer."""
    return to_api_error(EngineUnavailableError(reason or "the engine stopped before the answer was complete"))


def engine_cut_off() -> ApiError:
    """The engine ended a request early that nobody had aborted: a bug."""
    return ApiError("the engine ended the request before the answer was complete", status=500, kind="server_error")


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error response of `app` one in OpenAI's shape."""

    async def on_error(_request: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"no such route: {request.method} {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(message, status=error.status_code, headers=error.headers).response()

    async def on_disconnect(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, InvalidRequestError, EngineOverloadedError, EngineUnavailableError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnectedError, on_disconnect)
