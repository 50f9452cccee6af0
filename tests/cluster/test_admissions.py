"""A request and the call that holds its place arrive at an engine in any order: it runs once, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster import admissions
from cluster.admissions import Admissions
from cluster.frames import Row
from cluster.messages import Refusal, RefusalKind
from engine.core import EngineHealth, QueueFullError
from engine.news import EngineLoad, EngineNews
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams

LOAD = EngineLoad(running=1, waiting=0, queued_tokens=0, free_blocks=9)
REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=2))


class Engine:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.full = False
        self.cache: dict[bytes, bool] = {}
        self.state = EngineHealth(healthy=True)

    def health(self) -> EngineHealth:
        return self.state

    def submit(self, request: EngineRequest) -> None:
        if self.full:
            raise QueueFullError("full")
        self.submitted.append(request.request_id)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        (self.finished if reason is FinishReason.STOP else self.aborted).append(request_id)

    def news(self) -> EngineNews:
        cache, self.cache = self.cache, {}
        return EngineNews(load=LOAD, cache=cache)


class Connection:
    """Notes what is posted."""

    def __init__(self) -> None:
        self.frames: list[list[tuple[int, RequestOutput]]] = []
        self.news: list[Row] = []
        self.refused: dict[int, Refusal] = {}

    def refuse(self, stream: int, refusal: Refusal) -> None:
        self.refused[stream] = refusal

    def post(self, outputs: Sequence[tuple[int, RequestOutput]], news: Sequence[Row] = ()) -> None:
        if outputs:
            self.frames.append(list(outputs))
        self.news += news

    @property
    def tokens(self) -> list[int]:
        return [token for frame in self.frames for _, output in frame for token in output.token_ids]


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def line() -> Connection:
    return Connection()


@pytest.fixture
async def desk(engine: Engine) -> AsyncIterator[Admissions]:
    made = Admissions()
    made.attach(engine)  # type: ignore[arg-type]
    yield made
    assert made.is_idle


def output(*ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=ids, finish_reason=reason)


async def call(desk: Admissions) -> asyncio.Task:
    """What the Serve call does, up to where it waits."""

    async def admit() -> object:
        admission = await desk.called("r")
        return "never came" if admission is None else await desk.hold(admission)

    task = asyncio.create_task(admit())
    await asyncio.sleep(0)
    return task


async def ended(task: asyncio.Task) -> object:
    async with asyncio.timeout(5):
        return await task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("call_first", [True, False])
async def test_a_request_starts_when_it_arrives_and_its_call_ends_with_it(
    desk: Admissions, engine: Engine, line: Connection, call_first: bool
) -> None:
    early = await call(desk) if call_first else None
    assert engine.submitted == []
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    assert engine.submitted == ["r"]
    held = early or await call(desk)
    desk.emit([output(5)])
    await settle()
    assert not held.done()
    desk.emit([output(6, reason=FinishReason.LENGTH)])
    assert await ended(held) is None
    assert line.tokens == [5, 6]
    assert {stream for frame in line.frames for stream, _ in frame} == {3}
    assert engine.aborted == []


async def test_a_call_that_comes_after_the_end_ends_at_once(desk: Admissions, line: Connection) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    desk.emit([output(5, reason=FinishReason.LENGTH)])
    await settle()
    assert await ended(await call(desk)) is None


async def test_a_refusal_goes_over_the_line_and_with_the_call(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    engine.full = True
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    assert line.refused[3].kind is RefusalKind.OVERLOADED
    assert await ended(await call(desk)) == line.refused[3]
    assert line.frames == []


async def test_a_refused_request_is_forgotten_when_its_ingress_has_heard(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    engine.full = True
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    desk.withdrawn(Connection(), "r")  # type: ignore[arg-type]
    assert not desk.is_idle  # another ingress' word does not count
    desk.withdrawn(line, "r")  # type: ignore[arg-type]
    assert desk.is_idle


async def test_a_call_that_is_cancelled_aborts_its_request(desk: Admissions, engine: Engine, line: Connection) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    held = await call(desk)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert engine.aborted == ["r"]
    desk.emit([output(5, reason=FinishReason.ABORT)])
    await settle()
    assert line.tokens == []  # nobody reads it


async def test_a_request_that_is_withdrawn_is_aborted_before_its_call_comes(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    desk.withdrawn(Connection(), "r")  # type: ignore[arg-type]
    assert engine.aborted == []  # another ingress has no say in it
    desk.withdrawn(line, "r")  # type: ignore[arg-type]
    assert engine.aborted == ["r"]
    assert await ended(await call(desk)) is None


async def test_a_request_whose_reader_has_enough_is_none_that_was_aborted(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    held = await call(desk)
    desk.withdrawn(line, "r", is_finished=True)  # type: ignore[arg-type]
    assert (engine.finished, engine.aborted) == (["r"], [])
    assert await ended(held) is None


async def test_an_ingress_that_is_gone_takes_its_requests_along(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    held = await call(desk)
    desk.lost(line)  # type: ignore[arg-type]
    assert engine.aborted == ["r"]
    assert await ended(held) is None


async def test_a_call_whose_request_never_comes_says_so(desk: Admissions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "REQUEST_TIMEOUT_S", 0.05)
    assert await ended(await call(desk)) == "never came"


@pytest.mark.parametrize("finished", [False, True])
async def test_a_request_whose_call_never_comes_does_not_stay(
    desk: Admissions, engine: Engine, line: Connection, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr(admissions, "CALL_TIMEOUT_S", 0.05)
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    if finished:
        desk.emit([output(5, reason=FinishReason.LENGTH)])
    await asyncio.sleep(0.2)
    assert engine.aborted == ([] if finished else ["r"])
    [(_, last)] = line.frames[-1]
    assert last.finish_reason is (FinishReason.LENGTH if finished else FinishReason.ERROR)


async def test_a_call_that_serve_sends_twice_waits_for_the_same_request(desk: Admissions, line: Connection) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    first, second = await call(desk), await call(desk)
    desk.emit([output(5, reason=FinishReason.LENGTH)])
    assert [await ended(first), await ended(second)] == [None, None]


async def test_a_call_that_is_cancelled_does_not_break_its_twin(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    first, second = await call(desk), await call(desk)
    first.cancel()
    await asyncio.wait([first])
    assert engine.aborted == []
    desk.emit([output(5, reason=FinishReason.LENGTH)])
    assert await ended(second) is None
    assert line.tokens == [5]


async def test_when_both_calls_are_cancelled_the_request_is_aborted(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    calls = [await call(desk), await call(desk)]
    for one in calls:
        one.cancel()
    await asyncio.wait(calls)
    assert engine.aborted == ["r"]


async def test_a_call_that_brings_its_request_twice_starts_it_once(
    desk: Admissions, engine: Engine, line: Connection
) -> None:
    calls = [asyncio.create_task(desk.hold(desk.brought(REQUEST, 3, line))) for _ in range(2)]  # type: ignore[arg-type]
    await settle()
    assert engine.submitted == ["r"]
    assert line.refused == {}
    desk.emit([output(5, reason=FinishReason.LENGTH)])
    assert [await ended(one) for one in calls] == [None, None]
    assert line.tokens == [5]


async def test_steps_that_the_event_loop_did_not_get_to_leave_as_one(desk: Admissions, line: Connection) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    held = await call(desk)
    for token in range(4):
        desk.emit([output(token)])
    await settle()
    assert line.tokens == [0, 1, 2, 3]
    assert len(line.frames) == 2  # the word that it was taken, and the tokens
    desk.emit([output(4, reason=FinishReason.LENGTH)])
    await ended(held)


async def test_when_the_engine_hangs_all_requests_end_with_the_reason(desk: Admissions, line: Connection) -> None:
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    held = await call(desk)
    desk.fail_all("no step for 9 s")
    assert await ended(held) is None
    [(_, last)] = line.frames[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "no step for 9 s")


async def test_an_engine_that_hangs_takes_no_requests(desk: Admissions, engine: Engine, line: Connection) -> None:
    engine.state = EngineHealth(healthy=False, reason="no step for 9 s")
    desk.arrived(line, 3, REQUEST)  # type: ignore[arg-type]
    refusal = await ended(await call(desk))
    assert refusal is not None
    assert (refusal.kind, refusal.message) == (RefusalKind.UNAVAILABLE, "no step for 9 s")
    assert not engine.submitted
