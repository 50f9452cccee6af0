"""The ingress side of the line to an engine: every way in which a request can end ends it, with the right error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError

from cluster import continuation, exchange, line_keeper, ray_client
from cluster.balancer import Balancer, Route
from cluster.client import EngineOverloadedError, EngineUnavailableError
from cluster.messages import Refusal, RefusalKind, Ticket
from cluster.outbox import Connection, Outbox
from cluster.ray_client import RayEngineClient
from cluster.sockets import LineAddress
from engine.config import EngineConfig
from engine.core import InvalidRequestError
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams

Admit = Callable[[Ticket, EngineRequest | None], Any]
REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4))


class Response:
    """What a Serve handle returns: awaitable and cancellable."""

    def __init__(self, call: Any, cancelled: asyncio.Event) -> None:
        self._call = call
        self._cancelled = cancelled

    def __await__(self) -> Any:
        return self._call.__await__()

    def cancel(self) -> None:
        self._cancelled.set()


class Handle:
    """A deployment handle whose `admit` is a function of the test."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit
        self.cancelled = asyncio.Event()

    def options(self, **_: object) -> Handle:
        return self

    deployment_name = "Engine"

    def remote(self, *args: Any) -> Response:
        return Response(self._admit(*args), self.cancelled)

    @contextlib.asynccontextmanager
    async def choose_replica(self, *_: object, **__: object):
        yield SimpleNamespace(replica_id="one")


class Engine:
    """What an engine does with what comes over the line; tests replace what they look at."""

    def __init__(self) -> None:
        self.withdrawn_ids: list[str] = []
        self.finished_ids: list[str] = []

    def arrived(self, connection: Connection, stream: int, request: EngineRequest) -> None: ...

    def withdrawn(self, _: Connection, request_id: str, *, is_finished: bool) -> None:
        self.withdrawn_ids.append(request_id)
        self.finished_ids += [request_id] * is_finished

    def opened(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def outbox(engine: Engine):
    made = Outbox("one", engine)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client.ray_compat, "node_ip", lambda: "127.0.0.1")


def client_of(handle: Handle, resume_timeout_s: float = 0.3) -> RayEngineClient:
    return RayEngineClient(handle, handle, Balancer.of(EngineConfig()), resume_timeout_s=resume_timeout_s)  # type: ignore[arg-type]


async def outputs_of(handle: Handle) -> list[RequestOutput]:
    client = client_of(handle)
    async with asyncio.timeout(5):
        return [output async for output in client.generate(REQUEST)]


def tokens(*ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=ids, finish_reason=reason)


async def test_tokens_come_through_until_the_finish_reason(outbox: Outbox) -> None:
    async def admit(ticket: Ticket, _: EngineRequest | None) -> None:
        connection = await outbox.connect(ticket.address)
        connection.post([(ticket.stream, tokens(5))])
        connection.post([(ticket.stream, tokens(6, reason=FinishReason.LENGTH))])

    outputs = await outputs_of(Handle(admit))
    assert [token for output in outputs for token in output.token_ids] == [5, 6]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_tokens_that_arrive_after_the_call_has_ended_are_not_lost(outbox: Outbox) -> None:
    async def later(ticket: Ticket) -> None:
        await asyncio.sleep(0.1)
        (await outbox.connect(ticket.address)).post([(ticket.stream, tokens(5, reason=FinishReason.STOP))])

    tasks = []

    async def admit(ticket: Ticket, _: EngineRequest | None) -> None:
        tasks.append(asyncio.create_task(later(ticket)))

    [output] = await outputs_of(Handle(admit))
    assert output.token_ids == (5,)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (Refusal(kind=RefusalKind.OVERLOADED, message="full", retry_after_s=3), EngineOverloadedError),
        (Refusal(kind=RefusalKind.INVALID, message="too long", field="prompt"), InvalidRequestError),
        (Refusal(kind=RefusalKind.UNAVAILABLE, message="stopped"), EngineUnavailableError),
    ],
)
async def test_a_refusal_is_the_error_that_the_protocol_promises(refusal: Refusal, error: type[Exception]) -> None:
    async def admit(*_: object) -> Refusal:
        return refusal

    with pytest.raises(error, match=refusal.message) as caught:
        await outputs_of(Handle(admit))
    assert getattr(caught.value, "retry_after_s", 3) == 3
    assert getattr(caught.value, "field", "prompt") == "prompt"


class TwoEngines(Handle):
    """Whose router asks the balancer, as Serve's does."""

    @contextlib.asynccontextmanager
    async def choose_replica(self, route: Route, **_: object):
        yield SimpleNamespace(replica_id=route.balancer.choose(route, ["one", "two"], {}))


@pytest.mark.parametrize("full", [1, 2])
async def test_one_full_engine_is_not_the_last_word_while_there_is_another(outbox: Outbox, full: int) -> None:
    asked: list[str] = []

    async def admit(ticket: Ticket, _: EngineRequest | None) -> Refusal | None:
        asked.append(ticket.replica)
        if len(asked) <= full:
            return Refusal(kind=RefusalKind.OVERLOADED, message="full")
        connection = await outbox.connect(ticket.address)
        connection.post([(ticket.stream, tokens(5, reason=FinishReason.LENGTH))])
        return None

    client = client_of(TwoEngines(admit))
    if full == 1:
        assert [output.token_ids async for output in client.generate(REQUEST)][-1] == (5,)
    else:
        with pytest.raises(EngineOverloadedError, match="full"):
            await anext(client.generate(REQUEST))
    assert sorted(asked) == ["one", "two"]
    client.close()


async def test_serves_own_back_pressure_is_an_overload() -> None:
    async def admit(*_: object) -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    with pytest.raises(EngineOverloadedError):
        await outputs_of(Handle(admit))


async def test_an_engine_that_dies_before_the_first_token_is_unavailable() -> None:
    async def admit(*_: object) -> None:
        raise RayError("the actor died")

    with pytest.raises(EngineUnavailableError):
        await outputs_of(Handle(admit))


async def test_an_engine_that_dies_later_gives_what_there_is_and_then_an_error(outbox: Outbox) -> None:
    async def admit(ticket: Ticket, request: EngineRequest | None) -> None:
        if request != REQUEST:
            raise RayError("the actor died")
        (await outbox.connect(ticket.address)).post([(ticket.stream, tokens(5))])
        await asyncio.sleep(0.1)
        raise RayError("the actor died")

    generator = client_of(Handle(admit)).generate(REQUEST)
    async with asyncio.timeout(5):
        assert (await anext(generator)).token_ids == (5,)
        with pytest.raises(EngineUnavailableError, match="no other engine took the request over"):
            await anext(generator)


async def test_an_engine_that_says_it_is_done_but_sent_nothing_is_an_error_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "LAST_FRAME_TIMEOUT_S", 0.05)

    async def admit(*_: object) -> None:
        return None

    with pytest.raises(EngineUnavailableError):
        await outputs_of(Handle(admit))


async def test_closing_the_generator_cancels_the_call(outbox: Outbox) -> None:
    async def admit(ticket: Ticket, _: EngineRequest | None) -> None:
        (await outbox.connect(ticket.address)).post([(ticket.stream, tokens(5))])
        await asyncio.sleep(60)

    handle = Handle(admit)
    client = client_of(handle)
    generator = client.generate(REQUEST)
    await anext(generator)
    await generator.aclose()
    async with asyncio.timeout(5):
        await handle.cancelled.wait()


class Direct(Engine):
    """An engine to which a line is open: it starts what comes over it, and says which call came for what."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[EngineRequest] = []
        self.answers: list[RequestOutput] = []
        self.refusal: Refusal | None = None

    def arrived(self, connection: Connection, stream: int, request: EngineRequest) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            connection.refuse(stream, self.refusal)
        if self.answers:
            connection.post([(stream, output) for output in (RequestOutput(request_id="r"), *self.answers)])


class Line:
    """A client with a line to its engine. `calls` are the Serve calls since then, and `admit` answers them."""

    def __init__(self, engine: Direct) -> None:
        self.engine = engine
        self.outbox = Outbox("one", engine)
        self.calls: list[tuple[Ticket, EngineRequest | None]] = []
        self.handle = Handle(self._call)
        self.client = client_of(self.handle)
        self.admit: Admit = self._first

    async def _call(self, ticket: Ticket, request: EngineRequest | None) -> Refusal | None:
        self.calls.append((ticket, request))
        return await self.admit(ticket, request)

    async def _first(self, ticket: Ticket, _: EngineRequest | None) -> None:
        connection = await self.outbox.connect(ticket.address)
        connection.post([(ticket.stream, tokens(1, reason=FinishReason.LENGTH))])

    async def open(self) -> None:
        """A first request makes the engine connect."""
        await self.outputs()
        assert self.calls.pop()[1] == REQUEST
        self.admit = self._until_cancelled

    async def _until_cancelled(self, *_: object) -> None:
        await asyncio.sleep(60)

    async def outputs(self) -> list[RequestOutput]:
        async with asyncio.timeout(5):
            return [output async for output in self.client.generate(REQUEST)]


@pytest.fixture
async def line():
    made = Line(Direct())
    await made.open()
    yield made
    made.outbox.close()
    made.client.close()


async def test_over_a_line_the_request_goes_ahead_of_its_call_which_carries_its_name_only(line: Line) -> None:
    line.engine.answers = [tokens(5), tokens(6, reason=FinishReason.LENGTH)]
    outputs = await line.outputs()  # does not wait for the call
    assert [token for output in outputs for token in output.token_ids] == [5, 6]
    assert line.engine.requests == [REQUEST]
    [(ticket, request)] = line.calls
    assert request is None
    assert (ticket.request_id, ticket.replica) == ("r", "one")
    assert line.engine.withdrawn_ids == []
    assert not line.handle.cancelled.is_set()


async def test_a_reader_that_has_enough_says_so_and_its_call_ends_by_itself(line: Line) -> None:
    line.engine.answers = [tokens(5), tokens(6)]
    outputs = line.client.generate(REQUEST)
    while not (await anext(outputs)).token_ids:
        pass
    with pytest.raises(StopAsyncIteration):
        await outputs.asend(True)
    async with asyncio.timeout(5):
        while not line.engine.finished_ids:
            await asyncio.sleep(0.01)
    assert line.engine.finished_ids == line.engine.withdrawn_ids == ["r"]
    assert not line.handle.cancelled.is_set()


async def test_a_refusal_of_a_request_that_went_ahead_comes_with_its_call(line: Line) -> None:
    async def admit(*_: object) -> Refusal:
        return Refusal(kind=RefusalKind.OVERLOADED, message="full")

    line.admit = admit
    with pytest.raises(EngineOverloadedError, match="full"):
        await line.outputs()


async def test_a_refusal_over_the_line_is_heard_while_the_call_still_waits_and_ends_it(line: Line) -> None:
    line.engine.refusal = Refusal(kind=RefusalKind.OVERLOADED, message="full", retry_after_s=7)
    with pytest.raises(EngineOverloadedError, match="full") as caught:
        await line.outputs()
    assert caught.value.retry_after_s == 7
    async with asyncio.timeout(5):
        await line.handle.cancelled.wait()
        while line.engine.withdrawn_ids != ["r"]:
            await asyncio.sleep(0.01)


async def test_serves_refusal_withdraws_the_request_that_went_ahead(line: Line) -> None:
    async def admit(*_: object) -> None:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)

    line.admit = admit
    with pytest.raises(EngineOverloadedError):
        await line.outputs()
    async with asyncio.timeout(5):
        while line.engine.withdrawn_ids != ["r"]:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_withdraws_the_request_even_if_its_call_got_nowhere(line: Line) -> None:
    line.engine.answers = [tokens(5)]
    generator = line.client.generate(REQUEST)
    await anext(generator)
    await generator.aclose()
    async with asyncio.timeout(5):
        await line.handle.cancelled.wait()
        while line.engine.withdrawn_ids != ["r"]:
            await asyncio.sleep(0.01)


async def test_a_request_whose_replica_is_gone_before_it_began_goes_to_another_one(line: Line) -> None:
    async def admit(*_: object) -> Refusal:
        while not line.engine.requests:
            await asyncio.sleep(0.01)
        line.engine.answers = [tokens(5, reason=FinishReason.LENGTH)]
        return Refusal(kind=RefusalKind.MOVED, message="gone")

    line.admit = admit
    [output] = await line.outputs()
    assert output.token_ids == (5,)
    first, second = line.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.request_id != second.request_id  # what is still said of the first is not about the second


async def test_a_stream_whose_line_breaks_ends_with_an_error_if_no_engine_comes_back(line: Line) -> None:
    line.engine.answers = [tokens(5)]
    generator = line.client.generate(REQUEST)
    assert (await anext(generator)).token_ids == (5,)
    line.outbox.close()
    async with asyncio.timeout(5):
        with pytest.raises(EngineUnavailableError, match=exchange.ENGINE_GONE.message):
            await anext(generator)
    assert line.client.resumptions == continuation.ResumptionCounts(resumed=0, given_up=1)


async def test_a_stream_whose_line_breaks_goes_on_where_it_stopped(line: Line) -> None:
    line.engine.answers = [tokens(5), tokens(6)]
    generator = line.client.generate(REQUEST)
    assert (await anext(generator)).token_ids == (5, 6)
    line.admit = line._first
    line.outbox.close()
    async with asyncio.timeout(5):
        [rest] = [output async for output in generator]
    assert (rest.token_ids, rest.finish_reason) == ((1,), FinishReason.LENGTH)
    resumed = line.calls[-1][1]
    assert resumed is not None
    assert (resumed.prompt_token_ids, resumed.output_token_ids) == (REQUEST.prompt_token_ids, (5, 6))
    assert line.client.resumptions == continuation.ResumptionCounts(resumed=1, given_up=0)


async def test_an_engine_that_fails_hands_its_requests_on_and_its_last_tokens_count(line: Line) -> None:
    failed = tokens(7, reason=FinishReason.ERROR)
    line.engine.answers = [tokens(5), failed]
    generator = line.client.generate(REQUEST)
    assert (await anext(generator)).token_ids == (5, 7)
    line.engine.answers = [tokens(8, reason=FinishReason.LENGTH)]
    async with asyncio.timeout(5):
        [rest] = [output async for output in generator]
    assert rest.token_ids == (8,)
    assert line.engine.requests[-1].output_token_ids == (5, 7)


async def test_a_client_that_leaves_while_its_engine_is_lost_is_not_resumed(line: Line) -> None:
    line.engine.answers = [tokens(5)]
    generator = line.client.generate(REQUEST)
    await anext(generator)
    line.outbox.close()
    waiting = asyncio.create_task(anext(generator))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.wait([waiting])
    calls = len(line.calls)
    await asyncio.sleep(0.2)
    assert len(line.calls) == calls


async def test_a_request_that_no_engine_had_taken_when_the_line_broke_is_sent_again(line: Line) -> None:
    task = asyncio.create_task(line.outputs())
    while not line.engine.requests:
        await asyncio.sleep(0.01)
    line.admit = line._first  # there is no line any more: the call brings the request
    line.outbox.close()
    [output] = await task
    assert output.token_ids == (1,)
    assert line.calls[-1][1] is not None


async def test_a_request_that_finds_no_replica_in_time_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "ADMISSION_TIMEOUT_S", 0.1)

    async def admit(*_: object) -> Refusal:
        return Refusal(kind=RefusalKind.MOVED, message="gone")

    with pytest.raises(EngineUnavailableError, match="gone"):
        await outputs_of(Handle(admit))


async def test_a_request_that_its_call_took_along_is_interrupted_as_well_when_the_line_breaks(outbox: Outbox) -> None:
    calls: list[EngineRequest | None] = []

    async def admit(ticket: Ticket, request: EngineRequest | None) -> None:
        calls.append(request)
        connection = await outbox.connect(ticket.address)
        if len(calls) == 1:
            connection.post([(ticket.stream, tokens(5))])
            await asyncio.sleep(60)  # it hangs, and so does its call
        connection.post([(ticket.stream, tokens(6, reason=FinishReason.LENGTH))])

    handle = Handle(admit)
    generator = client_of(handle).generate(REQUEST)
    async with asyncio.timeout(5):
        assert (await anext(generator)).token_ids == (5,)
        outbox.close()
        assert [output.token_ids async for output in generator] == [(6,)]
    assert not handle.cancelled.is_set()  # see Exchange.close


async def test_engines_are_asked_for_lines_at_the_start_and_those_that_come_later_when_they_are_known(
    engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_keeper, "LINES_INTERVAL_S", 0.05)
    asked = 0

    async def info(*_: object) -> str:
        return "info"

    async def broadcast(_: object, method: str, address: LineAddress) -> list[Any]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError("no network yet")
        assert method == "open_line"
        return [boxes[asked > 2].connect(address)]

    monkeypatch.setattr(ray_client.ray_compat, "broadcast", broadcast)
    later = Outbox("two", engine)
    boxes = (outbox, later)
    balancer = Balancer.of(EngineConfig())
    client = RayEngineClient(Handle(info), Handle(info), balancer, resume_timeout_s=1)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await client.info()
        while client._mailbox.replicas != {"one"}:
            await asyncio.sleep(0.01)
        balancer.choose(balancer.begin(REQUEST), ("one", "two"), {})  # Serve knows of another one
        while client._mailbox.replicas != {"one", "two"}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    assert asked == 3
    client.close()
    later.close()
