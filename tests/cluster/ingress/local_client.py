"""The HTTP application over an engine in the same process: what tests of the protocol use in place of a cluster."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import uvicorn
from fastapi import FastAPI

from backends.mock import MockBackend
from cluster.client import EngineOverloadedError, EngineUnavailableError, Health
from cluster.ingress.app import build_api
from engine.backend import Backend, BackendInfo
from engine.config import EngineConfig
from engine.core import EngineCore, EngineStoppedError, QueueFullError
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.text.tokenizer import Tokenizer, load_tokenizer

FIRST_PORT, LAST_PORT = 8200, 8299


@cache
def demo_tokenizer() -> Tokenizer:
    """SmolLM2's; loading it takes a second or two."""
    return load_tokenizer(EngineConfig())


class LocalEngineClient:
    """An EngineClient over an EngineCore on a thread of this process."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.core = EngineCore(config, backend, self._emit)
        self._queues: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.aborted: list[str] = []
        self.sessions: list[str] = []

    def start(self) -> None:
        self.core.load()
        self.core.start()

    async def info(self) -> BackendInfo:
        return self.core.info

    async def health(self) -> Health:
        state = self.core.health()
        return Health(healthy=state.healthy, reason=state.reason)

    async def metrics_text(self) -> bytes:
        values = self.core.metrics().values
        return "".join(f"{name} {value}\n" for name, value in values.items()).encode()

    async def generate(
        self, request: EngineRequest, *, session: str = ""
    ) -> AsyncGenerator[RequestOutput, bool | None]:
        self._loop = asyncio.get_running_loop()
        self.sessions.append(session)
        queue = self._queues[request.request_id] = asyncio.Queue()
        ended = False
        try:
            try:
                self.core.submit(request)
            except QueueFullError as error:
                raise EngineOverloadedError(str(error), retry_after_s=2) from error
            except EngineStoppedError as error:
                raise EngineUnavailableError(str(error)) from error
            while not ended:
                output = await queue.get()
                ended = output.finish_reason is not None
                if (yield output):
                    ended = True
                    self.core.abort(request.request_id, FinishReason.STOP)
        finally:
            if not ended:
                self.aborted.append(request.request_id)
                self.core.abort(request.request_id)
            del self._queues[request.request_id]

    def _emit(self, outputs: list[RequestOutput]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    url: str
    config: EngineConfig
    client: LocalEngineClient


@contextmanager
def serve_api(app: FastAPI) -> Iterator[str]:
    """Runs an application under uvicorn on a thread; gives its URL."""
    sock = _free_port()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start within 20 s"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(15)
        sock.close()


@contextmanager
def local_server(*, eos_every: int = 0, backend: Backend | None = None, **options: object) -> Iterator[LocalServer]:
    """A server with the mock backend (or another one) and SmolLM2's tokenizer."""
    config = EngineConfig.from_args({"backend": "mock", **options})
    client = LocalEngineClient(config, backend or MockBackend(config, eos_every=eos_every))
    client.start()
    try:
        with serve_api(build_api(config, client, demo_tokenizer())) as url:
            yield LocalServer(url=url, config=config, client=client)
    finally:
        client.core.stop()


def _free_port() -> socket.socket:
    for port in range(FIRST_PORT, LAST_PORT):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            sock.close()
        else:
            return sock
    raise AssertionError(f"no free port between {FIRST_PORT} and {LAST_PORT}")
