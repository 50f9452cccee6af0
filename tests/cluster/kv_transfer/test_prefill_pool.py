"""Calls of prefill replicas that Serve does not get there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.balancer import Balancer
from cluster.kv_transfer import prefill_pool
from cluster.kv_transfer.messages import TransferTicket
from cluster.kv_transfer.prefill_pool import PrefillError, ServePrefillPool
from engine.config import EngineConfig


class Handle:
    """Of a deployment whose only replica has died: its calls wait for the next one. Is its own response."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, *_: object) -> Handle:
        return self

    async def _to_object_ref(self) -> None:
        await asyncio.sleep(3600)

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_a_call_that_no_replica_takes_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_pool, "ACCEPT_TIMEOUT_S", 0.05)
    handle: Any = Handle()
    pool = ServePrefillPool(handle, Balancer.of(EngineConfig.from_args({"backend": "mock"}), hears_news=False))
    with pytest.raises(PrefillError, match="took no call") as caught:
        await asyncio.wait_for(pool.fetch(TransferTicket(replica="p", transfer="t"), 0, 0), 5)
    assert caught.value.reason == "unavailable"
    assert handle.is_cancelled
