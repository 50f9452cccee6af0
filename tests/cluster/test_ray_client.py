"""The ingress side of the line to an engine: every way in which a request can end ends it, with the right error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError

from cluster import ray_client
from cluster.client import EngineOverloadedError, EngineUnavailableError, Health
from cluster.mailbox import MailboxAddress, Outbox
from cluster.messages import Refusal, RefusalKind
from cluster.metrics_text import EngineReport, IngressReport, ReplicaLabels
from cluster.ray_client import RayEngineClient
from engine.core import InvalidRequestError
from engine.metrics import EngineMetrics
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams

Admit = Callable[[EngineRequest, int, MailboxAddress], Any]
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


@pytest.fixture
async def outbox():
    made = Outbox(lambda _: None)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client.ray_compat, "node_ip", lambda: "127.0.0.1")


async def outputs_of(handle: Handle) -> list[RequestOutput]:
    client = RayEngineClient(handle, handle)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        return [output async for output in client.generate(REQUEST)]


def tokens(*ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=ids, finish_reason=reason)


async def test_tokens_come_through_until_the_finish_reason(outbox: Outbox) -> None:
    async def admit(_: EngineRequest, stream: int, address: MailboxAddress) -> None:
        connection = await outbox.connect(address)
        connection.post([(stream, tokens(5))])
        connection.post([(stream, tokens(6, reason=FinishReason.LENGTH))])

    outputs = await outputs_of(Handle(admit))
    assert [token for output in outputs for token in output.token_ids] == [5, 6]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_tokens_that_arrive_after_the_call_has_ended_are_not_lost(outbox: Outbox) -> None:
    async def later(stream: int, address: MailboxAddress) -> None:
        await asyncio.sleep(0.1)
        (await outbox.connect(address)).post([(stream, tokens(5, reason=FinishReason.STOP))])

    tasks = []

    async def admit(_: EngineRequest, stream: int, address: MailboxAddress) -> None:
        tasks.append(asyncio.create_task(later(stream, address)))

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
    async def admit(_: EngineRequest, stream: int, address: MailboxAddress) -> None:
        (await outbox.connect(address)).post([(stream, tokens(5))])
        await asyncio.sleep(0.1)
        raise RayError("the actor died")

    first, last = await outputs_of(Handle(admit))
    assert first.token_ids == (5,)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error


async def test_an_engine_that_says_it_is_done_but_sent_nothing_is_an_error_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_client, "LAST_FRAME_TIMEOUT_S", 0.05)

    async def admit(*_: object) -> None:
        return None

    with pytest.raises(EngineUnavailableError):
        await outputs_of(Handle(admit))


async def test_closing_the_generator_cancels_the_call(outbox: Outbox) -> None:
    async def admit(_: EngineRequest, stream: int, address: MailboxAddress) -> None:
        (await outbox.connect(address)).post([(stream, tokens(5))])
        await asyncio.sleep(60)

    handle = Handle(admit)
    client = RayEngineClient(handle, handle)  # type: ignore[arg-type]
    generator = client.generate(REQUEST)
    await anext(generator)
    await generator.aclose()
    async with asyncio.timeout(5):
        await handle.cancelled.wait()


class Replicas(Handle):
    """A deployment handle whose replicas answer, fail or hang, whatever is asked."""

    def __init__(self, *answers: object) -> None:
        self._answers = answers

    def broadcast(self, _method: str) -> Replicas:
        return self

    async def _fetch_replica_results_async(self) -> list[Replica]:
        return [Replica(answer) for answer in self._answers]


class Replica:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def get_async(self) -> object:
        if self._answer is HANGS:
            await asyncio.sleep(60)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


HANGS = object()
HEALTHY = Health(healthy=True, reason="")
DEAD = RayError("the actor died")


@pytest.mark.parametrize(
    ("answers", "health"),
    [
        ((HANGS, HEALTHY), HEALTHY),
        ((DEAD, HANGS, HEALTHY), HEALTHY),
        ((HEALTHY, Health(healthy=False, reason="no step")), Health(healthy=False, reason="no step")),
        ((HANGS, DEAD), Health(healthy=False, reason=ray_client.NO_ENGINE)),
        ((), Health(healthy=False, reason=ray_client.NO_ENGINE)),
    ],
)
async def test_a_replica_that_hangs_or_is_dead_does_not_hide_the_others(
    answers: tuple[object, ...], health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_client, "BROADCAST_TIMEOUT_S", 0.1)
    replicas = Replicas(*answers)
    client = RayEngineClient(replicas, replicas)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        assert await client.health() == health


async def test_metrics_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client, "BROADCAST_TIMEOUT_S", 0.1)
    labels = ReplicaLabels(model_name="m", application="a", replica="good")
    engines = Replicas(HANGS, EngineReport(labels=labels, metrics=EngineMetrics().snapshot()))
    ingresses = Replicas(HANGS, IngressReport(labels=labels, responses={}, open_requests=3))
    async with asyncio.timeout(5):
        text = (await RayEngineClient(engines, ingresses).metrics_text()).decode()  # type: ignore[arg-type]
    assert 'sliceserve_http_requests_open{application="a",model_name="m",replica="good"} 3.0' in text
    assert "vllm:num_requests_running" in text
