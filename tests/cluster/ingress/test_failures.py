"""What clients see, and what the engine is told, when things go wrong: overload, failure, time, clients that leave."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import httpx
import openai
import pytest

from backends.mock import MockBackend
from cluster.ingress import sse
from engine.backend import BackendError, PendingStep
from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.request import EngineRequest, FinishReason, RequestOutput
from tests.cluster.ingress.local_client import LocalServer, local_server

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
GONE = "the engine that served this request is gone; try again"


class BreakingBackend(MockBackend):
    """Works until told to break."""

    broken = False

    def dispatch(self, batch: StepBatch) -> PendingStep:
        if self.broken:
            raise BackendError("the device is gone")
        return super().dispatch(batch)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(server: LocalServer) -> int:
    values = server.client.core.metrics().values
    return int(values["num_requests_running"] + values["num_requests_waiting"])


@pytest.fixture
def slow() -> Iterator[LocalServer]:
    with local_server(mock_step_ms=20, max_decode_seqs=2, max_queued_requests=1) as server:
        yield server


def test_a_stream_that_waits_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.1)
    with local_server(mock_step_ms=500) as server:
        body = {**CHAT, "stream": True, "max_tokens": 3, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            lines = list(response.iter_lines())
        assert 4 <= lines.count(": waiting") <= 10
        assert lines[-2] == "data: [DONE]"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
        )
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None


def test_a_client_that_leaves_a_stream_aborts_it(slow: LocalServer) -> None:
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": True, "n": 2}) as response:
        received = response.iter_bytes()  # a dropped iterator would close the connection
        next(received)
        assert running(slow) == 2
    until(lambda: running(slow) == 0)
    assert len(slow.client.aborted) == 2


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/generate", {"instances": [{"prompt": "a", "max_tokens": 5000}, {"prompt": "b", "max_tokens": 5000}]}),
    ],
)
def test_a_client_that_stops_waiting_for_a_document_aborts_it(slow: LocalServer, route: str, body: object) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(slow.url + route, json=body, timeout=2)
    until(lambda: bool(slow.client.aborted))
    until(lambda: running(slow) == 0)


def test_a_client_that_leaves_the_queue_frees_its_place(slow: LocalServer) -> None:
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": True, "n": 2}) as response:
        received = response.iter_bytes()  # a dropped iterator would close the connection
        next(received)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=1)
        until(lambda: running(slow) == 2)


def test_overload_is_a_429_that_says_when_to_come_back(slow: LocalServer) -> None:
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": True, "n": 3}) as response:
        received = response.iter_bytes()  # a dropped iterator would close the connection
        next(received)
        for stream in (False, True):
            refused = httpx.post(f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": stream})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "2"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        client = openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="", **CHAT)


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with local_server(mock_step_ms=20, request_timeout_s=0.4) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 504
        assert "request_timeout_s" in answer.json()["error"]["message"]
        events = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True}).text.split("\n\n")
        assert "request_timeout_s" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        until(lambda: running(server) == 0)


def test_time_up_in_the_engine_is_the_same_as_in_the_ingress(slow: LocalServer) -> None:
    async def late(request: EngineRequest, **_: object) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput(request_id=request.request_id, finish_reason=FinishReason.TIMEOUT, error="late")

    slow.client.generate = late  # type: ignore[method-assign]
    error = httpx.post(f"{slow.url}/v1/chat/completions", json=CHAT)
    assert (error.status_code, error.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize(
    ("route", "body"), [("/v1/chat/completions", {**CHAT, "n": 2}), ("/generate", {"instances": [{"prompt": "a"}]})]
)
def test_an_engine_that_goes_before_a_document_is_complete_is_a_503(
    slow: LocalServer, route: str, body: dict[str, object]
) -> None:
    async def dies(request: EngineRequest, **_: object) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput(request_id=request.request_id, token_ids=(50,))
        yield RequestOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=GONE)

    slow.client.generate = dies  # type: ignore[method-assign]
    refused = httpx.post(slow.url + route, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine")
    assert refused.json()["error"]["message"] == GONE
    assert int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, None])
def test_an_answer_that_the_engine_cuts_off_is_a_500(slow: LocalServer, reason: FinishReason | None) -> None:
    async def cuts_off(request: EngineRequest, **_: object) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput(request_id=request.request_id, token_ids=(50,), finish_reason=reason)

    slow.client.generate = cuts_off  # type: ignore[method-assign]
    answer = httpx.post(f"{slow.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 500
    assert "before the answer was complete" in answer.json()["error"]["message"]


def test_an_engine_that_breaks_ends_streams_with_an_error_event_and_then_answers_503() -> None:
    config = EngineConfig.from_args({"backend": "mock", "mock_step_ms": 10})
    backend = BreakingBackend(config)
    with local_server(backend=backend, mock_step_ms=10) as server:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**CHAT, "stream": True}, timeout=10) as response:
            lines = response.iter_lines()
            next(lines)
            backend.broken = True
            last = [line for line in lines if line][-1]
        assert "the device is gone" in json.loads(last.removeprefix("data: "))["error"]["message"]
        for stream in (False, True):
            refused = httpx.post(url, json={**CHAT, "stream": stream})
            assert refused.status_code == 503
            assert "the device is gone" in refused.json()["error"]["message"]
        for probe in ("/health", "/ping"):
            unhealthy = httpx.get(server.url + probe)
            assert unhealthy.status_code == 503
            assert int(unhealthy.headers["retry-after"]) >= 1
            assert "the device is gone" in unhealthy.json()["error"]["message"]


def test_the_openai_client_raises_on_an_error_event() -> None:
    config = EngineConfig.from_args({"backend": "mock", "mock_step_ms": 10})
    backend = BreakingBackend(config)
    with local_server(backend=backend, mock_step_ms=10) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="", **CHAT, stream=True)
        next(stream)
        backend.broken = True
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(stream)


def test_a_bug_is_a_500_in_one_line(slow: LocalServer) -> None:
    async def broken(request: EngineRequest, **_: object) -> AsyncGenerator[RequestOutput, None]:
        raise ZeroDivisionError(f"secret detail of {request.request_id}")
        yield

    slow.client.generate = broken  # type: ignore[method-assign]
    for stream in (False, True):
        answer = httpx.post(f"{slow.url}/v1/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error; the server's log has the details"
