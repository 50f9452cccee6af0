"""Requests that find no replica, because all have been stopped: a call that Serve counts is made for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from cluster import waker
from cluster.balancer import Balancer
from cluster.client import EngineUnavailableError
from cluster.ray_client import RayEngineClient
from cluster.waker import Waker
from engine.config import EngineConfig
from engine.request import EngineRequest, SamplingParams

REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=1))


class Calls:
    """Counts calls, each of which takes as long as the test wants."""

    def __init__(self) -> None:
        self.count = 0
        self.answered = asyncio.Event()

    async def __call__(self) -> None:
        self.count += 1
        await self.answered.wait()


async def value_after(delay_s: float) -> str:
    await asyncio.sleep(delay_s)
    return "replica"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker, "LONG_SEARCH_S", 0.02)


async def test_a_search_that_finds_something_at_once_calls_nobody() -> None:
    calls = Calls()
    assert await Waker(calls).patiently(value_after(0)) == "replica"
    assert calls.count == 0


async def test_many_long_searches_make_one_call() -> None:
    calls = Calls()
    one = Waker(calls)
    assert await asyncio.gather(*(one.patiently(value_after(0.08)) for _ in range(20))) == ["replica"] * 20
    assert calls.count == 1


async def test_a_search_that_is_given_up_ends_and_the_next_one_calls_again() -> None:
    calls = Calls()
    one = Waker(calls)
    for count in (1, 2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await one.patiently(value_after(10))
        assert calls.count == count
        calls.answered.set()
        await asyncio.sleep(0)


async def test_a_call_that_ends_without_a_replica_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker, "NEXT_CALL_S", 0.02)
    calls = Calls()
    one = Waker(calls)
    searching = asyncio.create_task(one.patiently(value_after(0.2)))
    await asyncio.sleep(0.05)
    assert calls.count == 1
    assert one._calling is not None
    one._calling.cancel()  # as with the request that made it
    assert await searching == "replica"
    assert calls.count == 2


class SleepingDeployment:
    """A deployment without replicas: calls and searches wait."""

    deployment_name, app_name = "Engine", "app"

    def __init__(self) -> None:
        self.calls = 0

    def options(self, **_: object) -> SleepingDeployment:
        return self

    async def remote(self, *_: object) -> object:
        self.calls += 1
        return await asyncio.Event().wait()

    def broadcast(self, *_: object) -> Any:
        async def none() -> list[object]:
            return []

        return type("Broadcast", (), {"_fetch_replica_results_async": staticmethod(none)})

    @contextlib.asynccontextmanager
    async def choose_replica(self, *_: object, **__: object) -> Any:
        yield await asyncio.Event().wait()


def client(deployment: SleepingDeployment, wake_timeout_s: float | None) -> RayEngineClient:
    balancer = Balancer.of(EngineConfig.from_args({"backend": "mock"}))
    handle: Any = deployment
    return RayEngineClient(handle, handle, balancer, resume_timeout_s=1, wake_timeout_s=wake_timeout_s)


async def test_a_request_for_which_no_engine_starts_in_time_is_unavailable() -> None:
    deployment = SleepingDeployment()
    one = client(deployment, 0.1)
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineUnavailableError):
        await anext(one.generate(REQUEST))
    assert 0.08 < asyncio.get_running_loop().time() - began < 2
    assert deployment.calls == 1
    one.close()


async def test_a_server_that_sleeps_is_well_and_one_that_should_not_is_not() -> None:
    asleep = await client(SleepingDeployment(), 60).health()
    assert asleep.healthy
    assert "the next request starts one" in asleep.reason
    assert not (await client(SleepingDeployment(), None).health()).healthy
