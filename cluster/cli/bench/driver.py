"""Sends the load: a fixed number of requests at a time (closed loop) or arrivals at a rate (open loop)."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.cli.bench.http_stream import HttpClient, HttpError
from cluster.cli.bench.stream import StreamReader
from cluster.cli.bench.workload import WorkItem, poisson_offsets


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """What happened to one request. Times in seconds; `started` counts from the level's start."""

    started: float
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One load level: `concurrency` requests at a time, or `rate` a second (then `concurrency`, if set, is a cap)."""

    requests: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelResult:
    """A level's records, how long it took and what share of one core the client used."""

    level: Level
    records: list[RequestRecord]
    duration: float
    client_cpu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """How a work item becomes a request."""

    model: str
    chat: bool
    timeout_s: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, item: WorkItem) -> bytes:
        fields = {
            "model": self.model,
            "max_tokens": item.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps({**fields, **item.body, **self.extra}, separators=(",", ":")).encode()


async def served_model(client: HttpClient) -> str:
    """Name of the first model the server lists.

    Raises:
        HttpError: the server can't be reached or lists none.
    """
    listing = json.loads(await client.get("/v1/models", timeout_s=10))
    models = [entry["id"] for entry in listing.get("data", [])]
    if not models:
        raise HttpError("the server lists no model; give --model")
    return str(models[0])


async def run_level(
    client: HttpClient,
    endpoint: Endpoint,
    items: Iterator[WorkItem],
    level: Level,
    *,
    seed: int = 0,
    on_done: Callable[[RequestRecord], None] = lambda _record: None,
) -> LevelResult:
    """Runs one level to its end. Requests that fail are recorded, not raised."""
    slots = asyncio.Semaphore(level.concurrency or level.requests)
    offsets = itertools.repeat(0.0) if level.rate is None else poisson_offsets(level.rate, seed)
    records: list[RequestRecord] = []
    begin, cpu = time.perf_counter(), time.process_time()

    async def one(item: WorkItem, offset: float) -> None:
        await asyncio.sleep(begin + offset - time.perf_counter())
        # An open loop's latency counts from the arrival, waiting for a slot included.
        arrived = begin + offset if level.rate is not None else None
        async with slots:
            record = await _send(client, endpoint, item, begin, arrived)
        records.append(record)
        on_done(record)

    async with asyncio.TaskGroup() as group:
        for item, offset in zip(itertools.islice(items, level.requests), offsets, strict=False):
            group.create_task(one(item, offset))
    duration = time.perf_counter() - begin
    client_cpu = (time.process_time() - cpu) / duration
    return LevelResult(level=level, records=records, duration=duration, client_cpu=client_cpu)


async def _send(
    client: HttpClient, endpoint: Endpoint, item: WorkItem, begin: float, arrived: float | None
) -> RequestRecord:
    body = endpoint.body(item)
    reader = StreamReader(chat=endpoint.chat)
    now = time.perf_counter()
    sent = now if arrived is None else min(arrived, now)  # the event loop's timers may be a millisecond early
    try:
        await client.post(endpoint.path, body, reader.feed, timeout_s=endpoint.timeout_s)
    except HttpError as error:
        return RequestRecord(started=sent - begin, error=str(error))
    problem = reader.error or _incomplete(reader)
    if problem is not None:
        return RequestRecord(started=sent - begin, error=problem)
    return _record(reader, sent, begin)


def _incomplete(reader: StreamReader) -> str | None:
    if not reader.finished:
        return "the stream ended without [DONE]"
    if not reader.arrivals:
        return "the stream carried no tokens"
    if reader.usage is None:
        return "the stream carried no usage record"
    return None


def _record(reader: StreamReader, sent: float, begin: float) -> RequestRecord:
    usage = reader.usage or {}
    details = usage.get("prompt_tokens_details") or {}
    arrivals = reader.arrivals
    return RequestRecord(
        started=sent - begin,
        ttft=arrivals[0] - sent,
        e2e=arrivals[-1] - sent,
        gaps=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        output_tokens=int(usage.get("completion_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )
