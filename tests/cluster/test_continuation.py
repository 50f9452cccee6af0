"""What becomes of a request whose engine is lost: what the next one is asked, how often, how long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster import continuation
from cluster.client import EngineOverloadedError, EngineUnavailableError
from cluster.continuation import Continuation, ResumptionCounts
from cluster.messages import Refusal, RefusalKind
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.validation import InvalidRequestError

REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=9, seed=3))
GONE = Refusal(kind=RefusalKind.UNAVAILABLE, message="gone")
FULL = Refusal(kind=RefusalKind.OVERLOADED, message="full")
MOVED = Refusal(kind=RefusalKind.MOVED, message="moved")
INVALID = Refusal(kind=RefusalKind.INVALID, message="too long", field="prompt")


@pytest.fixture
async def way():
    return Continuation(REQUEST, resume_timeout_s=30, counts=ResumptionCounts())


def serve(way: Continuation, *token_ids: int, cached: int = 0) -> EngineRequest:
    """An engine takes the request and yields these tokens."""
    asked = way.next_request()
    way.taken()
    if token_ids:
        way.passed(RequestOutput(request_id=asked.request_id, token_ids=token_ids, num_cached_tokens=cached))
    return asked


async def test_the_next_engine_is_asked_to_go_on_behind_the_last_token_under_another_name(way: Continuation) -> None:
    assert serve(way, 5, 6) == REQUEST
    way.interrupted(GONE)
    asked = serve(way, 7)
    assert asked == replace(REQUEST, request_id=asked.request_id, output_token_ids=(5, 6))
    way.interrupted(GONE)
    again = way.next_request()
    assert again.output_token_ids == (5, 6, 7)
    assert len({REQUEST.request_id, asked.request_id, again.request_id}) == 3


async def test_cached_tokens_are_those_of_the_engine_that_read_the_prompt(way: Continuation) -> None:
    serve(way, 5, cached=32)
    way.interrupted(GONE)
    way.taken()
    assert way.passed(RequestOutput(request_id="r", token_ids=(6,), num_cached_tokens=64)).num_cached_tokens == 32


async def test_a_request_that_kills_the_engines_that_take_it_is_given_up(way: Continuation) -> None:
    for _ in range(continuation.DEATHS_AT_ONE_TOKEN - 1):
        serve(way)
        way.interrupted(GONE)
    serve(way)
    with pytest.raises(EngineUnavailableError, match="3 engines failed while they served this request"):
        way.interrupted(GONE)


async def test_deaths_between_which_it_got_on_are_not_its_own_doing_until_there_are_many(way: Continuation) -> None:
    for token in range(continuation.MAX_DEATHS - 1):
        serve(way, token)
        way.interrupted(GONE)
    serve(way, 99)
    with pytest.raises(EngineUnavailableError, match="10 engines failed"):
        way.interrupted(GONE)


async def test_engines_that_drain_or_were_gone_before_are_nobodys_death(way: Continuation) -> None:
    for _ in range(2 * continuation.MAX_DEATHS):
        serve(way)
        way.interrupted(MOVED)


async def test_a_full_queue_refuses_a_new_request_and_lets_an_interrupted_one_wait(way: Continuation) -> None:
    way.next_request()
    with pytest.raises(EngineOverloadedError):
        way.interrupted(FULL)
    serve(way, 5)
    way.interrupted(GONE)
    way.next_request()
    delays = [way.interrupted(FULL) for _ in range(12)]
    assert delays[0] <= 4 * continuation.FIRST_BACKOFF_S
    assert max(delays) <= continuation.MAX_BACKOFF_S
    assert delays[-1] >= continuation.MAX_BACKOFF_S / 2


async def test_what_no_engine_can_serve_is_not_tried_again(way: Continuation) -> None:
    serve(way, 5)
    way.interrupted(GONE)
    way.next_request()
    with pytest.raises(InvalidRequestError, match="too long"):
        way.interrupted(INVALID)


async def test_an_engine_in_trouble_that_is_the_only_one_refuses_at_once(way: Continuation) -> None:
    way.next_request()
    way.interrupted(GONE)  # there may be another one
    with pytest.raises(EngineUnavailableError, match="gone"):
        way.interrupted(GONE, last_resort=True)


@pytest.mark.parametrize("resume_timeout_s", [0.0, 0.2])
async def test_the_time_without_an_engine_is_limited(resume_timeout_s: float) -> None:
    counts = ResumptionCounts()
    way = Continuation(REQUEST, resume_timeout_s=resume_timeout_s, counts=counts)
    serve(way, 5)

    async def try_on() -> None:
        while True:
            await asyncio.sleep(way.interrupted(GONE))

    with pytest.raises(EngineUnavailableError, match=f"within {resume_timeout_s:g} s"):
        await asyncio.wait_for(try_on(), 5)
    assert counts == ResumptionCounts(resumed=0, given_up=1)
