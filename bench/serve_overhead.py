"""What the serving layer costs: tokens/s and time to first token through HTTP with an engine that takes no time.

    python -m bench.serve_overhead                 # both front ends: Serve's Python proxy and HAProxy
    python -m bench.serve_overhead --front=haproxy --streams=64 --tokens=512

Starts `sliceserve serve --backend=mock` for each front end, so that everything but the model is real: HTTP, tokenizer,
detokenizer, Serve, the engine's scheduler. Client and server share this machine's cores. Not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends import create_backend
from bench.peers import running, serving
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput, SamplingParams

PROMPT = "Tell me about the history of the city that you like most, in as much detail as you can."
START_TIMEOUT_S = 180
REQUEST_TIMEOUT_S = 120
HAPROXY_SETTLE_S = 8  # HAProxy reloads in its first seconds, which closes idle connections
TARGETS = {"proxy": (10_000, 15.0), "haproxy": (20_000, 6.0)}  # tokens/s, added TTFT in ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    ttft_s: float
    tokens: int
    chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    front: str
    tokens_per_s: list[float]  # per round
    chunks_per_s: float
    ttft_ms: float
    added_ttft_ms: float


class Client:
    """A connection that sends completion requests; next to no work of its own, as it shares the server's cores."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def complete(self, max_tokens: int) -> Reply:
        body = {
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            start = time.perf_counter()
            writer.write(head.encode() + payload)
            text, first = b"", 0.0
            while data := await reader.read(1 << 16):
                text += data
                if not first and b"data: " in text:
                    first = time.perf_counter() - start
            writer.close()
        lines = [line for line in text.split(b"\n") if line.startswith(b"data: ")]
        if b"[DONE]" not in lines[-1]:
            raise RuntimeError(f"the stream broke off: {text[-300:]!r}")
        usage = json.loads(lines[-2][6:])["usage"]
        return Reply(ttft_s=first, tokens=usage["completion_tokens"], chunks=len(lines) - 2)


async def measure(front: str, port: int, streams: int, tokens: int, rounds: int, own_ttft_ms: float) -> Result:
    client = Client(port)
    for _ in range(20):
        await client.complete(8)
    ttft_ms = 1e3 * statistics.median([(await client.complete(2)).ttft_s for _ in range(60)])
    rates, chunk_rates = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        replies = await asyncio.gather(*(client.complete(tokens) for _ in range(streams)))
        elapsed = time.perf_counter() - start
        rates.append(sum(reply.tokens for reply in replies) / elapsed)
        chunk_rates.append(sum(reply.chunks for reply in replies) / elapsed)
    return Result(
        front=front,
        tokens_per_s=rates,
        chunks_per_s=statistics.median(chunk_rates),
        ttft_ms=ttft_ms,
        added_ttft_ms=ttft_ms - own_ttft_ms,
    )


def engine_ttft_ms() -> float:
    """The engine's own time to first token, without anything around it."""
    arrived = threading.Event()

    def emit(outputs: list[RequestOutput]) -> None:
        if any(output.token_ids for output in outputs):
            arrived.set()

    config = EngineConfig(backend="mock")
    core = EngineCore(config, create_backend(config), emit)
    core.load()
    core.start()
    times = []
    for number in range(60):
        arrived.clear()
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        request = EngineRequest(request_id=str(number), prompt_token_ids=tuple(range(10, 30)), sampling=sampling)
        start = time.perf_counter()
        core.submit(request)
        if not arrived.wait(10):
            raise RuntimeError("the engine does not answer")
        times.append(time.perf_counter() - start)
    core.stop()
    return 1e3 * statistics.median(times)


@contextmanager
def server(front: str, port: int) -> Iterator[None]:
    """A running `sliceserve serve` with the mock backend."""
    flags = ["--haproxy"] if front == "haproxy" else []
    with running(serving(port, "--backend=mock", *flags), start_deadline_s=START_TIMEOUT_S):
        if front == "haproxy":
            time.sleep(HAPROXY_SETTLE_S)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=[*TARGETS, "both"], default="both")
    parser.add_argument("--port", type=int, default=8140)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    own = engine_ttft_ms()
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; the engine's own TTFT {own:.2f} ms (median)"
    )
    print("front    tokens/s median     best   target  chunks/s  TTFT ms  added  target")
    for front in TARGETS if args.front == "both" else [args.front]:
        with server(front, args.port):
            result = asyncio.run(measure(front, args.port, args.streams, args.tokens, args.rounds, own))
        rate, ttft = TARGETS[front]
        print(
            f"{front:<8} {statistics.median(result.tokens_per_s):>15,.0f} {max(result.tokens_per_s):>8,.0f} {rate:>8,} "
            f"{result.chunks_per_s:>9,.0f} {result.ttft_ms:>8.1f} {result.added_ttft_ms:>6.1f} {ttft:>7.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
