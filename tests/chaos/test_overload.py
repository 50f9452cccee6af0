"""Ten times more requests than the engine can serve: the rest is told to come back, and nothing grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.chaos.faults import engines, eventually, ingresses, resident_bytes
from tests.chaos.streams import http_client
from tests.cluster.apps import completion, deployed

STEP_MS, RUNNING, WAITING, TOKENS = 20, 8, 8, 40
CAPACITY = RUNNING / (STEP_MS / 1000)
"""Tokens per second."""
OFFERED_PER_S = 10 * CAPACITY / TOKENS
MAX_GROWTH_BYTES = 128 << 20


@dataclass(slots=True)
class Load:
    """Requests that start at a fixed rate, whatever becomes of those before."""

    url: str
    started: float = field(default_factory=time.monotonic)
    statuses: list[int] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # what came in place of tokens or 429
    without_retry_after: int = 0
    finished: list[float] = field(default_factory=list)  # when a request got all of its tokens

    async def offer(self, client: httpx.AsyncClient, per_s: float, seconds: float) -> None:
        started, tasks = time.monotonic(), []
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, started + number / per_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(client)))
        await asyncio.gather(*tasks)

    async def one(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": [1000, 1001, 1002], "max_tokens": TOKENS, "ignore_eos": True}
        answer = await client.post(f"{self.url}/v1/completions", json=body)
        self.statuses.append(answer.status_code)
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == TOKENS
            self.finished.append(time.monotonic())
        elif answer.status_code != 429:
            self.unexpected.append(f"{time.monotonic() - self.started:.1f} s: {answer.status_code} {answer.text[:300]}")
        elif not int(answer.headers.get("retry-after", 0)):
            self.without_retry_after += 1

    def tokens_per_s(self) -> float:
        """Of requests that got all of theirs, from the first request to the last answer."""
        return len(self.finished) * TOKENS / (self.finished[-1] - self.started)


async def capacity(client: httpx.AsyncClient, url: str, seconds: float) -> float:
    """Tokens per second with as many clients as there are places, each with its next request at once."""
    load, until = Load(url), time.monotonic() + seconds

    async def client_of_its_own() -> None:
        while time.monotonic() < until:
            await load.one(client)

    await asyncio.gather(*(client_of_its_own() for _ in range(RUNNING + WAITING)))
    assert set(load.statuses) == {200}
    return load.tokens_per_s()


@pytest.fixture
def overloaded(serve_url: str) -> Iterator[str]:
    options = {"mock_step_ms": STEP_MS, "max_decode_seqs": RUNNING, "max_queued_requests": WAITING}
    with deployed(serve_url, "crowd", **options) as url:
        yield url


def resident() -> dict[psutil.Process, int]:
    return {process: resident_bytes(process) for process in (*engines("crowd"), *ingresses("crowd"))}


async def watched(sizes: list[dict[psutil.Process, int]], interval_s: float) -> None:
    """Adds what all processes take, until cancelled."""
    while True:
        sizes.append(await asyncio.to_thread(resident))
        await asyncio.sleep(interval_s)


async def recovery_s(url: str, after_s: float) -> float:
    """From the last request that is too much, with the queue full, until one is answered."""
    await asyncio.sleep(after_s)
    return await eventually(lambda: completion(url, max_tokens=4).status_code == 200, 30)


@pytest.mark.parametrize(
    ("seconds", "goodput"),
    [pytest.param(8, 0.8, id="short"), pytest.param(60, 0.9, id="long", marks=pytest.mark.matrix)],
)
async def test_ten_times_too_many_requests_cost_the_others_nothing(
    overloaded: str, seconds: int, goodput: float
) -> None:
    async with http_client() as client:
        alone = await capacity(client, overloaded, 3)
        sizes: list[dict[psutil.Process, int]] = []
        watch = asyncio.create_task(watched(sizes, seconds / 8))
        load = Load(overloaded)
        recovery = asyncio.create_task(recovery_s(overloaded, seconds))
        await load.offer(client, OFFERED_PER_S, seconds)
        watch.cancel()
        before, after = sizes[0], await asyncio.to_thread(resident)
        recovered_s = await recovery
    assert not load.unexpected, f"{len(load.unexpected)} of {len(load.statuses)}: {load.unexpected[:3]}"
    assert set(load.statuses) == {200, 429}
    assert load.without_retry_after == 0
    assert load.tokens_per_s() >= goodput * alone
    assert after.keys() == before.keys()  # nobody was restarted
    assert all(after[process] - before[process] < MAX_GROWTH_BYTES for process in after)
    assert recovered_s < 5  # the queue is full at first
    refused = load.statuses.count(429)
    grown = ", ".join(
        "/".join(f"{(size[process] - before[process]) / 2**20:+.0f}" for size in (*sizes[1:], after))
        for process in after
    )
    print(
        f"{load.tokens_per_s():.0f} tokens/s of {CAPACITY:.0f} (alone {alone:.0f}), {refused} of {len(load.statuses)} "
        f"refused, RSS {grown} MiB, the next request was answered after {recovered_s:.2f} s"
    )
