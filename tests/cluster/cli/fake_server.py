"""A server that speaks just enough of the OpenAI protocol for the clients' tests, in a thread, on a free port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class FakeServer:
    """What the server does and what it has seen."""

    url: str = ""
    token_delay_s: float = 0.0
    failure: str | None = None
    """`status`: every generation is a 429; `midway`: an error breaks the stream off; `cut`: it ends without [DONE]."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _running: int = 0

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.failure == "status":
            return JSONResponse({"error": {"message": "queue is full"}}, status_code=429)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            if "messages" in body:
                yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for index in range(body.get("max_tokens", 3)):
                await asyncio.sleep(self.token_delay_s)
                if self.failure == "midway" and index == 1:
                    yield _event({"error": {"message": "engine died"}})
                    return
                text = f"w{index} "
                choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
                yield _event({"choices": [choice]})
            if self.failure != "cut":
                yield _event({"choices": [], "usage": _usage(body)})
                yield "data: [DONE]\n\n"
        finally:
            self._running -= 1


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, separators=(',', ':'))}\n\n"


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt", "")
    count = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
    details = {"cached_tokens": 32}
    return {"prompt_tokens": count, "completion_tokens": body.get("max_tokens", 3), "prompt_tokens_details": details}


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Runs a FakeServer for the length of a `with` block."""
    fake = FakeServer()
    routes = [
        Route("/v1/models", fake.models),
        Route("/v1/completions", fake.generate, methods=["POST"]),
        Route("/v1/chat/completions", fake.generate, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
