"""KV that comes from elsewhere and leaves: what the scheduler and the loop do with it, event by event."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backends.mock import MockBackend, mock_tokens
from engine.backend import Backend, BackendError
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, FinishReason, SamplingParams
from engine.running import Status
from tests.engine.driver import Driver
from tests.engine.fake_connector import Behaviour, FakeConnector, mock_kv
from tests.engine.loopback import DecodeConnector, PrefillEngine
from tests.engine.test_core import Engine

PROMPT = list(range(100, 137))  # 4 full blocks of 8 and a part of the fifth


def drive(behaviour: Behaviour | None = None, **options: Any) -> Driver:
    return Driver(connector=FakeConnector(lambda _: behaviour or Behaviour()), **options)


def finish(driver: Driver) -> None:
    driver.run()
    driver.assert_empty()
    for name in driver.states:
        assert driver.tokens(name) == driver.expected(name)


def test_a_fetched_prompt_is_not_computed_and_its_first_token_comes_with_it() -> None:
    driver = drive(Behaviour(sizes=[13, 11, 1000]))
    name = driver.submit(PROMPT)
    driver.step()
    assert driver.states[name].status is Status.IMPORTING
    assert driver.batches == []
    driver.connector.release_all()
    driver.step()
    assert len(driver.tokens(name)) == 1  # before any step
    finish(driver)
    assert [step.batch.num_tokens for step in driver.batches] == [1] * 15
    assert driver.metrics.kv_imported_tokens == len(PROMPT)
    histograms = driver.metrics.snapshot().histograms
    assert sum(histograms["time_to_first_token_seconds"].counts) == 1
    assert driver.metrics.generation_tokens == 16


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("first_token", [True, False])
def test_prompts_that_end_anywhere_in_a_block_are_fetched(length: int, first_token: bool) -> None:
    driver = drive(Behaviour(first_token=first_token))
    driver.submit(PROMPT[:length])
    driver.step()
    driver.connector.release_all()
    finish(driver)
    assert driver.batches[0].batch.num_tokens == 1  # the first token's KV, or the last prompt token again


@pytest.mark.parametrize(
    ("behaviour", "computed"),
    [
        (Behaviour(leaves_out=10), 10),
        (Behaviour(leaves_out=1000, failure="nobody is there"), 37),
        (Behaviour(sizes=[16, 1000], lost=1), 21),
        (Behaviour(sizes=[16, 1000], gap=1), 21),
        (Behaviour(failure="the prefill replica died after the last chunk"), 1),
    ],
)
def test_what_does_not_come_is_computed_here(behaviour: Behaviour, computed: int) -> None:
    driver = drive(behaviour)
    driver.submit(PROMPT)
    driver.step()
    driver.connector.release_all()
    finish(driver)
    assert driver.batches[0].batch.num_tokens == computed
    failed = behaviour.failure or behaviour.lost or behaviour.gap
    assert driver.metrics.kv_import_failures == (1 if failed else 0)


def test_who_waits_for_kv_is_in_nobodys_way() -> None:
    driver = drive(max_decode_seqs=1)
    driver.connector.behave = lambda demand: Behaviour() if demand.request.request_id == "slow" else None
    slow = driver.submit(PROMPT, name="slow")
    fast = driver.submit(list(range(500, 510)))
    while driver.reason(fast) is None:
        driver.step()
    assert driver.tokens(slow) == []
    driver.connector.release_all()
    finish(driver)


def test_a_first_token_does_not_wait_for_a_slot() -> None:
    driver = drive(max_decode_seqs=1)
    driver.connector.behave = lambda demand: Behaviour() if demand.request.request_id == "late" else None
    driver.submit(list(range(500, 510)), max_tokens=60)
    driver.step()
    late = driver.submit(PROMPT, name="late", max_tokens=1)
    driver.step()
    driver.connector.release_all()
    driver.step()
    assert driver.reason(late) is FinishReason.LENGTH
    finish(driver)


def test_fetched_blocks_are_shared_as_soon_as_they_are_written() -> None:
    driver = drive(Behaviour(sizes=[16, 1000]))
    driver.submit(PROMPT)
    driver.step()
    driver.connector.release(random.Random(0), 1)  # 16 of 37 tokens
    driver.step()
    driver.connector.behave = lambda _: None
    second = driver.submit([*PROMPT[:30], 7, 8, 9])
    driver.step()
    driver.step()
    assert driver.states[second].num_cached_tokens == 16
    driver.connector.release_all()
    finish(driver)


def test_a_local_prefix_is_not_fetched() -> None:
    driver = drive()
    driver.connector.behave = lambda _: None
    driver.submit(PROMPT)
    driver.run()
    driver.connector.behave = lambda _: Behaviour()
    name = driver.submit(PROMPT)
    driver.step()
    assert driver.connector.demands[-1].num_cached_tokens == 32
    assert len(driver.connector.demands[-1].block_hashes) == 4
    driver.connector.release_all()
    finish(driver)
    assert driver.states[name].num_cached_tokens == 32


def test_an_abort_frees_blocks_at_once_and_late_events_are_ignored() -> None:
    driver = drive(Behaviour(sizes=[8, 8, 1000]))
    name = driver.submit(PROMPT)
    driver.step()
    driver.connector.release(random.Random(0), 1)
    driver.step()
    driver.connector.release(random.Random(0), 1)
    driver.abort(name)
    driver.assert_empty()
    assert driver.connector.cancelled == [name]
    driver.submit(PROMPT[::-1])  # takes the blocks
    driver.step()
    driver.connector.release_all()
    driver.run()
    driver.assert_empty()


def test_importing_requests_give_way_to_decoding_ones() -> None:
    driver = drive(num_blocks=12, max_model_len=96)
    driver.connector.behave = lambda demand: Behaviour() if demand.request.request_id == "importing" else None
    decoding = driver.submit(list(range(500, 508)), max_tokens=80)
    driver.step()
    importing = driver.submit(PROMPT, name="importing")
    for _ in range(70):
        driver.step()
    assert driver.states[importing].status is Status.WAITING
    assert driver.connector.cancelled == [importing]
    assert driver.metrics.num_preemptions == 1
    finish(driver)
    assert len(driver.tokens(decoding)) == 80


def test_imports_do_not_overtake_a_request_that_waits_for_blocks() -> None:
    driver = drive(num_blocks=12, max_model_len=96)
    driver.connector.behave = lambda demand: Behaviour() if len(demand.token_ids) < 40 else None
    driver.submit(list(range(500, 540)), max_tokens=20)
    driver.step()
    large = driver.submit(list(range(600, 660)), max_tokens=5)
    small = driver.submit(PROMPT[:9], max_tokens=5)
    driver.step()
    assert driver.states[large].status is Status.WAITING
    assert driver.states[small].status is Status.WAITING
    finish(driver)


def test_a_fetched_prompt_is_handed_on() -> None:
    driver = drive()
    name = driver.submit(PROMPT, max_tokens=1, export_from=3)
    driver.step()
    driver.connector.release_all()
    finish(driver)
    exported = driver.connector.exports[name]
    assert exported.ranges == [(3, 37)]
    assert np.array_equal(exported.data, mock_kv(PROMPT)[:, :, :, 3:])


def test_prompt_logprobs_need_the_whole_prompt_to_be_computed_here() -> None:
    driver = drive()
    driver.submit(PROMPT, prompt_logprobs=1)
    finish(driver)
    assert driver.connector.demands == []


class Connected(Engine):
    """A running EngineCore with a FakeConnector."""

    def __init__(self, connector: FakeConnector, **options: Any) -> None:
        self.connector = connector
        super().__init__(**options)

    def create_core(self, config: EngineConfig, backend: Backend) -> EngineCore:
        return EngineCore(config, backend, self._emit, connector=self.connector)


@pytest.fixture
def connected() -> Iterator[Connected]:
    engine = Connected(FakeConnector(), step_deadline_s=0.2)
    engine.core.start()
    yield engine
    engine.core.stop()


def test_an_engine_that_only_waits_for_kv_sleeps_and_is_healthy(connected: Connected) -> None:
    connected.submit("a")
    deadline = time.monotonic() + 10
    while not connected.connector.demands and time.monotonic() < deadline:
        time.sleep(0.01)
    started, used = time.monotonic(), time.process_time()
    while time.monotonic() < started + 0.5:
        time.sleep(0.05)
    assert time.process_time() - used < 0.25
    assert connected.core.health().healthy
    connected.connector.release_all()
    assert connected.result("a").finish_reason is FinishReason.LENGTH
    assert connected.tokens("a") == mock_tokens(range(100, 120), 10)


def test_requests_that_wait_for_kv_can_be_aborted_and_time_out() -> None:
    engine = Connected(FakeConnector(), request_timeout_s=0.4)
    engine.core.start()
    engine.submit("a")
    engine.submit("b", prompt=tuple(range(300, 320)))
    engine.core.abort("b")
    assert engine.result("b").finish_reason is FinishReason.ABORT
    assert engine.result("a").finish_reason is FinishReason.TIMEOUT
    engine.core.stop()


def test_a_backend_that_can_not_exchange_kv_is_refused() -> None:
    class Plain(MockBackend):
        kv_format = Backend.kv_format

    config = EngineConfig.from_args({"backend": "mock"})
    core = EngineCore(config, Plain(config), lambda _: None, connector=FakeConnector())
    with pytest.raises(BackendError, match="can't exchange KV"):
        core.load()


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(8, 8), (8, 32), (32, 8), (16, 8)])
def test_a_decode_engine_writes_what_one_engine_alone_would(prefill_block: int, decode_block: int) -> None:
    options = {"backend": "mock", "max_model_len": 512, "max_num_batched_tokens": 32}
    config = EngineConfig.from_args({**options, "block_size": prefill_block})
    prefill = PrefillEngine(config, MockBackend(config, check=True))
    connector = DecodeConnector(prefill, lambda demand: len(demand.token_ids) - demand.num_cached_tokens > 10)

    class Decode(Engine):
        def create_core(self, config: EngineConfig, backend: Backend) -> EngineCore:
            return EngineCore(config, backend, self._emit, connector=connector)

    decode = Decode(block_size=decode_block)
    decode.core.start()
    rng = random.Random(prefill_block)
    prompts = {f"r{i}": tuple(range(100, 100 + rng.randrange(1, 150))) + (i,) * rng.randrange(5) for i in range(40)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=int(name[1:]) + 1, logprobs=1)
        decode.core.submit(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    for name, prompt in prompts.items():
        assert decode.result(name).finish_reason is FinishReason.LENGTH
        assert decode.tokens(name) == mock_tokens(prompt, 12, seed=int(name[1:]) + 1)
        assert all(output.logprobs and len(output.logprobs) == 1 for output in decode.outputs[name])
    assert connector.num_fetched > 5
    assert decode.core.metrics().values["kv_imported_tokens"] > 0
    decode.core.stop()
    prefill.stop()
