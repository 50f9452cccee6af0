"""What the load client itself costs: CPU time per streamed event, for `sliceserve bench` and for general HTTP clients.

    python -m bench.client_overhead

A process of its own sends ready-made events as fast as they are read, one write each, so that nothing but the client is
measured. aiohttp and httpx read the same streams in the simplest way.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.synchronize import Event

import aiohttp
import httpx
import uvloop

from cluster.cli.bench.driver import Endpoint, Level, run_level
from cluster.cli.bench.http_stream import HttpClient, Target
from cluster.cli.bench.workload import PromptShape, random_items

STREAMS, EVENTS = 16, 500
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % EVENTS
SHAPE = PromptShape(prompt_tokens=8, output_tokens=EVENTS)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    event = _chunk(TOKEN)
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            writer.write(HEAD)
            for _ in range(EVENTS):
                writer.write(event)
                await asyncio.sleep(0.002)
            writer.write(_chunk(USAGE) + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve(listener: socket.socket, ready: Event) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_answer, sock=listener)
        ready.set()
        await server.serve_forever()

    uvloop.run(run())


async def _ours(port: int) -> None:
    client = HttpClient(Target.from_url(f"http://127.0.0.1:{port}"))
    endpoint = Endpoint(model="m", chat=False, timeout_s=60)
    result = await run_level(
        client, endpoint, random_items(SHAPE, chat=False, seed=0), Level(requests=STREAMS, concurrency=STREAMS)
    )
    client.close()
    assert all(record.error is None for record in result.records)


async def _aiohttp(port: int) -> None:
    async def one(session: aiohttp.ClientSession) -> None:
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json={}) as response:
            times = [time.perf_counter() async for line in response.content if line.startswith(b"data:")]
            assert len(times) == EVENTS + 2

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session) for _ in range(STREAMS)))


async def _httpx(port: int) -> None:
    async def one(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json={}) as response:
            times = [time.perf_counter() async for line in response.aiter_lines() if line.startswith("data:")]
            assert len(times) == EVENTS + 2

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(one(client) for _ in range(STREAMS)))


def _cost_us(run: Callable[[int], Awaitable[None]], port: int) -> float:
    async def timed() -> float:
        begin = time.process_time()
        await run(port)
        return time.process_time() - begin

    return 1e6 * min(uvloop.run(timed()) for _ in range(3)) / (STREAMS * EVENTS)


def main() -> None:
    """Prints microseconds of CPU per event."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ready = multiprocessing.Event()
    server = multiprocessing.Process(target=_serve, args=(listener, ready), daemon=True)
    server.start()
    ready.wait(30)
    costs = {
        name: _cost_us(run, port) for name, run in (("sliceserve", _ours), ("aiohttp", _aiohttp), ("httpx", _httpx))
    }
    print(json.dumps({f"{name} µs/event": round(cost, 1) for name, cost in costs.items()}, ensure_ascii=False))
    server.terminate()


if __name__ == "__main__":
    main()
