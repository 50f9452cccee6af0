"""Calls for a prompt at a prefill replica: each prompt is computed once, and given up with the call that wants it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.kv_transfer.messages import PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.table import TransferTable
from cluster.prefill_desk import PrefillDesk
from cluster.roles import Role
from engine.core import EngineHealth
from engine.request import EngineRequest
from tests.cluster.kv_transfer.kv import last_output, request
from tests.cluster.kv_transfer.test_transfer import TOKEN, transport

TICKET = TransferTicket(replica="p", transfer="t")
ORDER = PrefillOrder(request=request(10, "t"), num_bytes=10 * TOKEN)


class Engine:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def health(self) -> EngineHealth:
        return EngineHealth(healthy=True)

    def submit(self, asked: EngineRequest) -> None:
        self.submitted.append(asked.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.fixture
async def table() -> TransferTable:
    return TransferTable(transport(), TransferMetrics(Role.PREFILL), max_bytes=15 * TOKEN, lease_s=5)


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def desk(table: TransferTable, engine: Engine) -> PrefillDesk:
    made = PrefillDesk(table)
    made.attach(engine)  # type: ignore[arg-type]
    return made


async def started(desk: PrefillDesk) -> asyncio.Task[object]:
    call = asyncio.create_task(desk.prefill(TICKET, ORDER))
    await asyncio.sleep(0.01)
    return call


async def assert_all_is_free(table: TransferTable) -> None:
    assert table.num_open == 0
    await asyncio.wait_for(table.open("u", 15 * TOKEN), 5)


async def test_a_call_that_serve_sends_twice_computes_its_prompt_once(
    desk: PrefillDesk, table: TransferTable, engine: Engine
) -> None:
    calls = [await started(desk) for _ in range(2)]
    assert engine.submitted == ["t"]
    desk.emit([last_output()])
    for call in calls:
        answer = await asyncio.wait_for(call, 5)
        assert isinstance(answer, PrefillAnswer)
        assert answer.next_token_id == 77
    desk.close(TICKET)
    await assert_all_is_free(table)


async def test_a_call_that_is_cancelled_gives_its_prompt_up(
    desk: PrefillDesk, table: TransferTable, engine: Engine
) -> None:
    call = await started(desk)
    call.cancel()
    await asyncio.wait([call])
    assert engine.aborted == ["t"]
    await assert_all_is_free(table)
