"""Calls of prefill replicas that Serve has not got there yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError

from cluster.balancer import Balancer
from cluster.gang.kv import KVSlice
from cluster.gang.ray_kv import GivenPayload
from cluster.kv_transfer import prefill_pool
from cluster.kv_transfer.messages import TransferTicket
from cluster.kv_transfer.prefill_pool import PrefillError, ServePrefillPool, _ReplicaHost
from engine.config import EngineConfig

TICKET = TransferTicket(replica="p", transfer="t")


class Handle:
    """Of a deployment whose replica takes a call when it is told to. Is its own response."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.is_cancelled = False
        self.calls: list[tuple[object, ...]] = []

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, *args: object) -> Handle:
        self.calls.append(args)
        return self

    async def _to_object_ref(self) -> asyncio.Future[object]:
        await self.takes.wait()
        return asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    monkeypatch.setattr(prefill_pool, "ACCEPT_TIMEOUT_S", 0.1)
    return Handle()


def pool(handle: Any) -> ServePrefillPool:
    return ServePrefillPool(handle, Balancer.of(EngineConfig.from_args({"backend": "mock"}), hears_news=False))


class Full(Handle):
    """Of a deployment that has too many calls."""

    async def _to_object_ref(self) -> asyncio.Future[object]:
        raise BackPressureError(num_queued_requests=3, max_queued_requests=2)


async def until_cancelled(handle: Handle) -> None:
    async with asyncio.timeout(5):
        while not handle.is_cancelled:
            await asyncio.sleep(0.001)


async def test_a_call_that_no_replica_takes_is_given_up_soon(handle: Handle) -> None:
    with pytest.raises(PrefillError, match="took no call") as caught:
        await asyncio.wait_for(pool(handle).fetch(TICKET, 0, 0, described=False), 5)
    assert caught.value.reason == "unavailable"
    await until_cancelled(handle)


async def test_a_call_that_is_given_up_before_a_replica_took_it_is_cancelled_when_one_has(handle: Handle) -> None:
    call = asyncio.create_task(pool(handle).fetch(TICKET, 0, 0, described=False))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call], timeout=5)
    assert call.cancelled()
    assert not handle.is_cancelled
    handle.takes.set()
    await until_cancelled(handle)


async def test_a_call_that_is_given_up_later_is_cancelled_at_once(handle: Handle) -> None:
    handle.takes.set()
    call = asyncio.create_task(pool(handle).fetch(TICKET, 0, 0, described=False))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call], timeout=5)
    assert handle.is_cancelled


@pytest.mark.parametrize("taken", [True, False])
async def test_heads_of_a_chunk_are_asked_for_from_a_thread_which_waits_until_a_replica_takes_the_call(
    handle: Handle, taken: bool
) -> None:
    host = _ReplicaHost(handle, TICKET, asyncio.get_running_loop())
    asked = asyncio.to_thread(host.ask, [KVSlice(key=3, first=0, end=8)], range(2), checksum=False)
    if taken:
        handle.takes.set()
        assert isinstance(await asyncio.wait_for(asked, 5), GivenPayload)
        assert handle.calls == [(TICKET, 3, range(2))]
        assert not handle.is_cancelled
    else:
        with pytest.raises(PrefillError, match="took no call"):
            await asyncio.wait_for(asked, 5)
        await until_cancelled(handle)


async def test_a_replica_with_too_many_calls_is_no_bug() -> None:
    with pytest.raises(PrefillError, match="too many calls"):
        await pool(Full()).fetch(TICKET, 0, 0, described=True)
    host = _ReplicaHost(Full(), TICKET, asyncio.get_running_loop())
    with pytest.raises(PrefillError, match="too many calls") as caught:
        await asyncio.to_thread(host.ask, [KVSlice(key=3, first=0, end=8)], range(2), checksum=False)
    assert caught.value.reason == "overloaded"
