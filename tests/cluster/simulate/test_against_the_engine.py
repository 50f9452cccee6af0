"""The simulated engine against EngineCore with the mock backend: equal steps, and in real time equal latencies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from backends.mock import MockBackend
from cluster.simulate.engine import SimulatedEngine
from cluster.simulate.models import mock_model
from cluster.simulate.timeline import START, Timeline
from engine.backend import Capabilities, PendingStep
from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput, SamplingParams

Step = tuple[tuple[int, ...], ...]
"""Slots, query lengths and KV lengths of a step's rows."""

TIMEOUT_S = 30.0
MOST_LATE_S = 0.0015


class RecordingBackend(MockBackend):
    """Writes down what it is told to compute."""

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.steps: list[Step] = []

    def dispatch(self, batch: StepBatch) -> PendingStep:
        self.steps.append(step_of(batch))
        return super().dispatch(batch)


def step_of(batch: StepBatch) -> Step:
    return tuple(batch.slots.tolist()), tuple(batch.query_lens.tolist()), tuple(batch.kv_lens.tolist())


def config_of(**options: Any) -> EngineConfig:
    small = {
        "block_size": 8,
        "max_num_batched_tokens": 64,
        "max_decode_seqs": 6,
        "max_model_len": 256,
        "num_blocks": 32,
    }
    return EngineConfig.from_args({"backend": "mock", **small, **options})


def requests_of(rng: random.Random, count: int) -> list[EngineRequest]:
    """Some share a beginning, some are longer than a step."""
    shared = [tuple(rng.choices(range(3000, 9000), k=48)) for _ in range(2)]
    requests = []
    for number in range(count):
        own = tuple(rng.choices(range(3000, 9000), k=rng.choice([1, 7, 30, 90])))
        prompt = (rng.choice([*shared, ()]) + own)[:150]
        sampling = SamplingParams(max_tokens=rng.randint(1, 90), temperature=0.0, ignore_eos=True)
        requests.append(EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
    return requests


class Feeder:
    """Submits one request, and others after so many steps with outputs: arrivals that need no clock."""

    def __init__(self, requests: list[EngineRequest], waits: list[int]) -> None:
        self.first = requests[0]
        self._later = list(zip(waits, requests[1:], strict=True))
        self._emitted = 0
        self._open = len(requests)
        self.done = threading.Event()
        self.submit: Callable[[EngineRequest], None]

    def emit(self, outputs: list[RequestOutput]) -> None:
        self._emitted += 1
        self._open -= sum(output.finish_reason is not None for output in outputs)
        while self._later and (self._later[0][0] <= self._emitted or self._open == len(self._later)):
            self.submit(self._later.pop(0)[1])
        if not self._open:
            self.done.set()


def real_steps(config: EngineConfig, capabilities: Capabilities, feeder: Feeder) -> list[Step]:
    backend = RecordingBackend(config, capabilities=capabilities)
    core = EngineCore(config, backend, feeder.emit)
    core.load()
    feeder.submit = core.submit
    core.start()
    core.submit(feeder.first)
    try:
        assert feeder.done.wait(TIMEOUT_S)
    finally:
        core.stop()
    return backend.steps


def simulated_steps(config: EngineConfig, capabilities: Capabilities, feeder: Feeder) -> list[Step]:
    class Clock:
        def __init__(self) -> None:
            self.steps: list[Step] = []

        def step_s(self, batch: StepBatch) -> float:
            self.steps.append(step_of(batch))
            return 0.01

        def decode_s(self, num_rows: int, kv_tokens: int) -> float:  # noqa: ARG002
            raise AssertionError("a step was not looked at")

    clock, timeline = Clock(), Timeline()
    model = mock_model(config, capabilities=capabilities, clock=clock)
    engine = SimulatedEngine(model, timeline, feeder.emit, coasts=False)
    feeder.submit = engine.submit
    engine.submit(feeder.first)
    timeline.run()
    assert feeder.done.is_set()
    assert engine.metrics.num_preemptions
    return clock.steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "capabilities",
    [Capabilities(), Capabilities(overlap=False), Capabilities(mixed_batches=False)],
    ids=["overlap", "no overlap", "unmixed"],
)
def test_the_same_steps_as_the_engine_takes(capabilities: Capabilities, seed: int) -> None:
    """Few blocks, so that requests wait and are preempted; the sampled tokens differ, and no schedule looks at them."""
    rng = random.Random(seed)
    requests = requests_of(rng, 20)
    waits = sorted(rng.randint(1, 30) for _ in range(19))
    config = config_of()
    real = real_steps(config, capabilities, Feeder(requests, waits))
    assert len(real) > 40
    assert simulated_steps(config, capabilities, Feeder(requests, waits)) == real


def test_latencies_are_those_of_the_engine_in_real_time() -> None:
    """Within 10 %; a run counts only if the machine had time for it."""
    config = config_of(mock_step_ms=25, mock_prefill_ms_per_token=0.2, num_blocks=400, max_decode_seqs=24)
    rng = random.Random(1)
    requests = [replace(one, sampling=replace(one.sampling, max_tokens=25)) for one in requests_of(rng, 24)]
    gaps = [rng.expovariate(1 / 0.04) for _ in requests]
    virtual = means(virtual_latencies(config, requests, gaps))
    for _ in range(3):
        latencies, lateness_s = real_latencies(config, requests, gaps)
        if lateness_s < MOST_LATE_S:
            assert virtual == pytest.approx(means(latencies), rel=0.1)
            return
    pytest.skip(f"this machine is too busy: threads wake {1000 * lateness_s:.1f} ms late")


class Latencies:
    """When requests came, and when their first and last tokens did."""

    def __init__(self, clock: Callable[[], float], count: int) -> None:
        self._clock = clock
        self._left = count
        self.came: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}
        self.done = threading.Event()

    def emit(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend([self._clock()] * len(output.token_ids))
            self._left -= output.finish_reason is not None
        if not self._left:
            self.done.set()

    def result(self) -> dict[str, list[float]]:
        tokens = self.tokens.items()
        return {
            "ttft": [times[0] - self.came[name] for name, times in tokens],
            "tpot": [(times[-1] - times[0]) / (len(times) - 1) for _, times in tokens if len(times) > 1],
        }


def real_latencies(
    config: EngineConfig, requests: list[EngineRequest], gaps: list[float]
) -> tuple[dict[str, list[float]], float]:
    """Latencies, and by how much sleeps were too long on average."""
    latencies = Latencies(time.monotonic, len(requests))
    core = EngineCore(config, MockBackend(config), latencies.emit)
    core.load()
    core.start()
    due, late_s = time.monotonic(), 0.0
    for request, gap in zip(requests, gaps, strict=True):
        due += gap
        time.sleep(max(0.0, due - time.monotonic()))
        late_s += time.monotonic() - due
        latencies.came[request.request_id] = time.monotonic()
        core.submit(request)
    try:
        assert latencies.done.wait(TIMEOUT_S)
    finally:
        core.stop()
    return latencies.result(), late_s / len(requests)


def virtual_latencies(config: EngineConfig, requests: list[EngineRequest], gaps: list[float]) -> dict[str, list[float]]:
    timeline = Timeline()
    latencies = Latencies(timeline, len(requests))
    engine = SimulatedEngine(mock_model(config), timeline, latencies.emit)
    due = START
    for request, gap in zip(requests, gaps, strict=True):
        due += gap

        def come(request: EngineRequest = request) -> None:
            latencies.came[request.request_id] = timeline.now
            engine.submit(request)

        timeline.at(due, come)
    timeline.run()
    return latencies.result()


def means(latencies: dict[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in latencies.items()}
