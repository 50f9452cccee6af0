"""Whole engines over one store: what comes from it is what they would have computed, and it holds up none of them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backends.mock import MockBackend, mock_tokens
from cluster.gang.backend import GangBackend
from cluster.prefix_store import writer
from cluster.prefix_store.connector import PrefixStoreConnector
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput, SamplingParams
from tests.cluster.apps import eventually
from tests.cluster.gang.local_gang import LocalLauncher
from tests.cluster.prefix_store.fake_store import FakeClient, FakeStore


class Engine:
    """One replica's engine, whose backend checks the KV of every row against the row's tokens."""

    def __init__(self, store: FakeStore, **options: Any) -> None:
        self.config = EngineConfig.from_args(
            {"backend": "mock", "block_size": 8, "max_model_len": 512, "kv_store": "object_store", **options}
        )
        hosts = [MockBackend(self.config, check=True) for _ in range(self.config.num_hosts)]
        backend = hosts[0] if len(hosts) == 1 else GangBackend(self.config, LocalLauncher(hosts))
        self.connector = PrefixStoreConnector(self.config, backend, FakeClient(store))
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.emitted_at: list[float] = []
        self.core = EngineCore(self.config, backend, self._emit, self.connector)
        self.core.load()
        self.core.start()
        eventually(lambda: self.metric("kv_store_connected") == 1)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        self.emitted_at.append(time.monotonic())
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def submit(self, name: str, prompt: list[int], max_tokens: int = 10, **fields: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.submit(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **fields))

    def ended(self, name: str) -> bool:
        outputs = self.outputs.get(name)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def metric(self, name: str) -> float:
        return self.connector.metrics().values[name]

    def knows(self, count: int) -> bool:
        return len(self.connector._follower._known) >= count


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def make(store: FakeStore, **options: Any) -> Engine:
        engines.append(Engine(store, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.stop()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(100, 20000), k=length)


def test_a_cold_engine_answers_with_the_prefix_that_another_one_computed(start: Start) -> None:
    store = FakeStore()
    warm, cold = start(store), start(store)
    tokens = prompt(1, 203)
    warm.submit("a", tokens)
    eventually(lambda: warm.ended("a") and cold.knows(25))
    cold.submit("b", [*tokens, 5, 6, 7])
    eventually(lambda: cold.ended("b"))
    assert cold.tokens("b") == mock_tokens([*tokens, 5, 6, 7], 10)
    assert {output.num_cached_tokens for output in cold.outputs["b"]} == {200}
    assert cold.metric("kv_store_hit_tokens") == 200
    assert cold.core.metrics().values["prefix_cache_hits"] == 0
    cold.submit("salted", tokens, cache_salt="another tenant")
    eventually(lambda: cold.ended("salted"))
    assert cold.outputs["salted"][-1].num_cached_tokens == 0


@pytest.mark.parametrize("hosts", [(2, 1), (1, 2), (2, 2)])
def test_engines_on_several_hosts_store_and_find_what_those_on_one_do(start: Start, hosts: tuple[int, int]) -> None:
    store = FakeStore()
    warm, cold = (start(store, num_hosts=count, tensor_parallel_size=count) for count in hosts)
    tokens = prompt(1, 203)
    warm.submit("a", tokens)
    eventually(lambda: warm.ended("a") and cold.knows(25))
    cold.submit("b", tokens)
    eventually(lambda: cold.ended("b"))
    assert cold.tokens("b") == mock_tokens(tokens, 10)
    assert cold.outputs["b"][-1].num_cached_tokens == 200
    assert cold.metric("kv_store_hit_tokens") == 200


def test_what_an_engine_had_to_give_up_comes_back_from_the_store(start: Start) -> None:
    store = FakeStore()
    engine = start(store, num_blocks=40, max_decode_seqs=2)
    answer_len = 60
    for number in range(6):  # together several times as much as the engine holds
        engine.submit(f"r{number}", prompt(number, 160), max_tokens=answer_len)
        eventually(lambda number=number: engine.ended(f"r{number}"))
    eventually(lambda: store.directory.num_blocks >= 6 * 20 + 7)
    first = prompt(0, 160) + engine.tokens("r0")
    eventually(lambda: engine.knows(127))
    engine.submit("again", first)  # a conversation goes on: prompt and answer come back
    eventually(lambda: engine.ended("again"))
    assert engine.tokens("again") == mock_tokens(first, 10)
    assert engine.outputs["again"][-1].num_cached_tokens > 160
    assert engine.metric("kv_store_hit_tokens") > 160


def test_many_engines_and_much_eviction_never_mix_anything_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 8 * 64)  # 8 blocks of the mock backend
    store = FakeStore(capacity_bytes=100_000)  # which is some 120 blocks; it gives up most of what comes
    options = {"num_blocks": 40, "max_decode_seqs": 3, "kv_store_min_tokens": 8, "mock_step_ms": 1}
    engines = [start(store, **options) for _ in range(2)]
    rng = random.Random(0)
    heads = [prompt(number, 120) for number in range(10)]
    prompts = {}
    for number in range(150):
        engine, name = engines[number % 2], f"r{number}"
        prompts[name] = rng.choice(heads)[: rng.randrange(8, 120)] + prompt(rng.randrange(8), rng.randrange(1, 60))
        engine.submit(name, prompts[name])
        if rng.random() < 0.1:
            engine.core.abort(name)
        eventually(lambda engine=engine: sum(not engine.ended(n) for n in engine.outputs) < 3)
    for number, name in enumerate(prompts):
        engine = engines[number % 2]
        eventually(lambda engine=engine, name=name: engine.ended(name))
        tokens = engine.tokens(name)
        assert tokens == mock_tokens(prompts[name], 10)[: len(tokens)]
    assert sum(engine.metric("kv_store_hit_tokens") for engine in engines) > 0
    assert store.directory.used_bytes <= 100_000
    assert store.directory.num_blocks < len(
        {known for segment in store.segments for known in segment}
    )  # some had to go


def test_a_store_that_hangs_changes_no_steps_time(start: Start) -> None:
    store = FakeStore()
    engine = start(store, mock_step_ms=5)
    engine.submit("known", prompt(1, 203))
    eventually(lambda: engine.ended("known") and engine.knows(25))
    store.delay_s = 3.0
    engine.submit("stream", prompt(2, 100), max_tokens=300)
    eventually(lambda: "stream" in engine.outputs)
    began = len(engine.emitted_at)
    engine.core.abort("known")
    for number in range(20):  # written to the store, and some of it read from there
        engine.submit(f"r{number}", prompt(1, 203) if number % 4 == 0 else prompt(10 + number, 200), max_tokens=2)
        time.sleep(0.02)
    eventually(lambda: all(engine.ended(f"r{number}") for number in range(20)) and engine.ended("stream"), 30)
    times = engine.emitted_at[began:]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] < 0.012
    assert gaps[-1] < 0.5  # the store keeps everybody waiting for seconds
    assert engine.tokens("stream") == mock_tokens(prompt(2, 100), 300)
    store.delay_s = 0.0
