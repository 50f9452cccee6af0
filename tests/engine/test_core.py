from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backends.mock import MockBackend, mock_tokens
from engine.backend import BackendError, BackendInfo, Capabilities, PendingStep, Progress, no_progress
from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.core import EngineCore, EngineStoppedError, InvalidRequestError, QueueFullError
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams

PROMPT = tuple(range(100, 120))


class Engine:
    """An EngineCore with its outputs."""

    def __init__(self, backend_type: type[MockBackend] = MockBackend, **options: Any) -> None:
        capabilities = options.pop("capabilities", None)
        self.config = EngineConfig.from_args({"backend": "mock", "block_size": 8, "max_model_len": 512, **options})
        self.backend = backend_type(self.config, check=True, capabilities=capabilities)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.emitted: list[list[RequestOutput]] = []
        self.arrived = threading.Condition()
        self.core = self.create_core(self.config, self.backend)
        self.info = self.core.load()

    def create_core(self, config: EngineConfig, backend: MockBackend) -> EngineCore:
        return EngineCore(config, backend, self._emit)

    def _emit(self, outputs: list[RequestOutput]) -> None:
        with self.arrived:
            self.emitted.append(outputs)
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self.arrived.notify_all()

    def submit(self, name: str = "a", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> str:
        own = {key: fields.pop(key) for key in ("output_token_ids", "arrival_time") if key in fields}
        sampling = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **fields})
        self.core.submit(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, **own))
        return name

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20) -> None:
        with self.arrived:
            assert self.arrived.wait_for(condition, timeout_s), "timed out"

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def result(self, name: str) -> RequestOutput:
        """Waits for a request's end; gives its last output."""
        self.wait(lambda: name in self.outputs and self.outputs[name][-1].finish_reason is not None)
        return self.outputs[name][-1]


class HangingBackend(MockBackend):
    """Its steps never end, until it is released."""

    released = threading.Event()

    def dispatch(self, batch: StepBatch) -> PendingStep:
        step = super().dispatch(batch)

        class Hanging(PendingStep):
            def result(self) -> StepResult:
                HangingBackend.released.wait(30)
                return step.result()

        return Hanging()


class FailingBackend(MockBackend):
    """Its third step fails."""

    error: Exception = BackendError("the device is gone: restart the server")

    def dispatch(self, batch: StepBatch) -> PendingStep:
        if batch.step == 2:
            raise self.error
        return super().dispatch(batch)


class BuggyBackend(FailingBackend):
    error = ValueError("line 1\nline 2")


class UnloadableBackend(MockBackend):
    def load(self, progress: Progress = no_progress) -> BackendInfo:  # noqa: ARG002
        raise BackendError("no such model")


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_engine(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        engines[-1].core.start()
        return engines[-1]

    HangingBackend.released.clear()
    yield start_engine
    HangingBackend.released.set()
    for engine in engines:
        engine.core.stop()


def test_a_request_is_answered(start: Callable[..., Engine]) -> None:
    engine = start()
    assert engine.result(engine.submit()).finish_reason is FinishReason.LENGTH
    assert engine.tokens("a") == mock_tokens(PROMPT, 10)
    assert len(engine.outputs["a"]) == 10


def test_many_requests_from_many_threads_get_their_own_answers(start: Callable[..., Engine]) -> None:
    engine = start(num_blocks=100, max_decode_seqs=16, max_num_batched_tokens=64)
    prompts = {f"{t}-{i}": tuple(range(50 + 7 * t, 60 + 7 * t + i)) for t in range(4) for i in range(15)}

    def send(thread: int) -> None:
        for name, prompt in prompts.items():
            if name.startswith(f"{thread}-"):
                engine.submit(name, prompt, max_tokens=30)

    threads = [threading.Thread(target=send, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for name, prompt in prompts.items():
        engine.result(name)
        assert engine.tokens(name) == mock_tokens(prompt, 30)


def test_a_step_emits_once_for_all_its_requests(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=5)
    for index in range(8):
        engine.submit(f"r{index}", max_tokens=20)
    for index in range(8):
        engine.result(f"r{index}")
    assert len(engine.emitted) <= 24
    assert max(len(outputs) for outputs in engine.emitted) == 8


def test_two_steps_are_in_flight_at_once(start: Callable[..., Engine]) -> None:
    class Counting(MockBackend):
        open_steps = most = 0

        def dispatch(self, batch: StepBatch) -> PendingStep:
            step, counting = super().dispatch(batch), Counting

            class Counted(PendingStep):
                def result(self) -> StepResult:
                    counting.open_steps -= 1
                    return step.result()

            counting.open_steps += 1
            counting.most = max(counting.most, counting.open_steps)
            return Counted()

    engine = start(Counting)
    engine.result(engine.submit())
    assert Counting.most == 2
    Counting.most = 0
    engine = start(Counting, capabilities=Capabilities(overlap=False))
    engine.result(engine.submit())
    assert Counting.most == 1
    assert engine.tokens("a") == mock_tokens(PROMPT, 10)


def test_abort_ends_a_request_within_a_step(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=2)
    engine.submit("a", max_tokens=400)
    engine.submit("b", max_tokens=30)
    engine.wait(lambda: len(engine.tokens("a")) >= 3)
    engine.core.abort("a")
    assert engine.result("a").finish_reason is FinishReason.ABORT
    assert len(engine.tokens("a")) < 30
    engine.result("b")
    assert engine.tokens("b") == mock_tokens(PROMPT, 30)
    engine.core.abort("a")  # unknown by now
    values = engine.core.metrics().values
    assert (values["num_requests_running"], values["kv_cache_usage_perc"]) == (0, 0)


def test_a_waiting_request_can_be_aborted(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=2, max_decode_seqs=1)
    engine.submit("a", max_tokens=300)
    engine.submit("b")
    engine.core.abort("b")
    assert engine.result("b").finish_reason is FinishReason.ABORT
    assert engine.tokens("b") == []
    engine.core.abort("a")


def test_the_queue_is_bounded(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=20, max_decode_seqs=1, max_queued_requests=2)
    for name in ("a", "b", "c"):
        engine.submit(name, max_tokens=5)
    with pytest.raises(QueueFullError, match=r"max_queued_requests"):
        engine.submit("d")
    engine.result("a")
    engine.submit("d")
    assert engine.result("d").finish_reason is FinishReason.LENGTH


def test_a_hanging_step_makes_the_engine_unhealthy(start: Callable[..., Engine]) -> None:
    engine = start(HangingBackend, step_deadline_s=0.2)
    assert engine.core.health().healthy
    engine.submit()
    assert engine.core.health().healthy
    time.sleep(0.5)
    assert not engine.core.health().healthy
    assert "no step for" in engine.core.health().reason
    HangingBackend.released.set()
    engine.result("a")
    assert engine.core.health().healthy


def test_stop_ends_requests_even_when_a_step_hangs(start: Callable[..., Engine]) -> None:
    engine = start(HangingBackend)
    engine.submit()
    engine.core.stop(timeout_s=0.1)
    assert engine.result("a").error == "the engine was stopped"
    HangingBackend.released.set()
    engine.core.stop()
    assert engine.tokens("a") == []


def test_a_slow_engine_is_healthy_and_so_is_an_idle_one(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=120, step_deadline_s=0.5)
    time.sleep(0.6)
    assert engine.core.health().healthy
    engine.submit(max_tokens=8)
    while engine.core.metrics().labelled["request_success"]["length"] == 0:
        assert engine.core.health().healthy
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (FailingBackend, "the device is gone: restart the server"),
        (BuggyBackend, "internal error: ValueError: line 1"),
    ],
)
def test_a_failing_step_ends_all_requests_with_its_reason(
    start: Callable[..., Engine], backend: type[MockBackend], message: str
) -> None:
    engine = start(backend, max_decode_seqs=1, mock_step_ms=50)
    names = [engine.submit(name) for name in "abc"]
    for name in names:
        assert (engine.result(name).finish_reason, engine.result(name).error) == (FinishReason.ERROR, message)
    assert (engine.core.health().healthy, engine.core.health().reason) == (False, message)
    with pytest.raises(EngineStoppedError, match=message):
        engine.submit("d")


def test_a_backend_that_cannot_load_says_why() -> None:
    with pytest.raises(BackendError, match="no such model"):
        Engine(UnloadableBackend)


def test_stop_ends_what_is_left_with_an_error(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=5)
    engine.submit(max_tokens=400)
    engine.wait(lambda: len(engine.tokens("a")) >= 2)
    engine.core.stop()
    assert (engine.result("a").finish_reason, engine.result("a").error) == (
        FinishReason.ERROR,
        "the engine was stopped",
    )
    assert not engine.core.health().healthy
    with pytest.raises(EngineStoppedError):
        engine.submit("b")


def test_an_engine_that_is_not_started_says_so() -> None:
    engine = Engine()
    assert engine.core.health().reason == "the engine is not started"
    with pytest.raises(EngineStoppedError, match="not started"):
        engine.submit()


def test_a_request_that_takes_too_long_ends_with_an_error(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=10, request_timeout_s=0.3)
    engine.submit(max_tokens=400)
    last = engine.result("a")
    assert last.finish_reason is FinishReason.TIMEOUT
    assert "request_timeout_s" in (last.error or "")
    assert engine.tokens("a") == mock_tokens(PROMPT, 400)[: len(engine.tokens("a"))]


def test_a_resubmitted_request_continues_identically(start: Callable[..., Engine]) -> None:
    engine = start()
    whole = mock_tokens(PROMPT, 30, seed=5)
    engine.submit(max_tokens=30, seed=5, temperature=1.0, output_token_ids=tuple(whole[:12]))
    engine.result("a")
    assert engine.tokens("a") == whole[12:]


@pytest.mark.parametrize(
    ("already", "sampling", "reason"),
    [
        (3, {"max_tokens": 3}, FinishReason.LENGTH),
        (3, {"stop_token_ids": (mock_tokens(PROMPT, 3)[-1],)}, FinishReason.STOP),
    ],
)
def test_a_resubmitted_request_that_was_complete_ends_at_once(
    start: Callable[..., Engine], already: int, sampling: dict[str, Any], reason: FinishReason
) -> None:
    engine = start()
    engine.submit(output_token_ids=tuple(mock_tokens(PROMPT, already)), **sampling)
    assert engine.result("a").finish_reason is reason
    assert engine.tokens("a") == []


def test_an_id_in_use_is_refused(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=5)
    engine.submit(max_tokens=100)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.submit()


def test_metrics_count_what_happened(start: Callable[..., Engine]) -> None:
    engine = start()
    for name in "ab":
        engine.submit(name, arrival_time=time.time() - 1)
        engine.result(name)
    metrics = pickle.loads(pickle.dumps(engine.core.metrics()))
    assert metrics.values["prompt_tokens"] == 40
    assert metrics.values["generation_tokens"] == 20
    assert metrics.values["prefix_cache_queries"] == 40
    assert metrics.values["prefix_cache_hits"] == 16
    assert metrics.labelled["request_success"] == {"stop": 0, "length": 2, "abort": 0, "timeout": 0, "error": 0}
    sums = {name: (sum(histogram.counts), histogram.sum) for name, histogram in metrics.histograms.items()}
    assert sums["time_to_first_token_seconds"][0] == 2
    assert 2 <= sums["time_to_first_token_seconds"][1] < 4
    assert sums["e2e_request_latency_seconds"][1] >= sums["time_to_first_token_seconds"][1]
    assert sums["inter_token_latency_seconds"][0] == 18
    assert sums["request_queue_time_seconds"][0] == 2
    assert sums["iteration_tokens_total"] == (20, 20 + 4 + 18)
    assert sums["request_prompt_tokens"] == (2, 40)
    assert sums["request_generation_tokens"] == (2, 20)


def test_metrics_split_a_requests_time_into_queue_prefill_and_decode(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=20)
    engine.result(engine.submit(max_tokens=11))
    sums = {name: histogram.sum for name, histogram in engine.core.metrics().histograms.items()}
    phases = (
        sums["request_queue_time_seconds"],
        sums["request_prefill_time_seconds"],
        sums["request_decode_time_seconds"],
    )
    assert sum(phases) == pytest.approx(sums["e2e_request_latency_seconds"], abs=0.001)
    assert phases[1] >= 0.02
    assert phases[2] >= 0.19  # ten tokens after the first one; sleeps may end a little early
    assert sums["request_time_per_output_token_seconds"] == pytest.approx(phases[2] / 10)


def test_metrics_of_a_request_that_ends_early_leave_out_what_it_never_came_to(start: Callable[..., Engine]) -> None:
    engine = start(mock_step_ms=200)
    name = engine.submit(max_tokens=100)
    engine.core.abort(name)
    engine.result(name)
    counts = {name: sum(histogram.counts) for name, histogram in engine.core.metrics().histograms.items()}
    assert counts["request_prompt_tokens"] == counts["e2e_request_latency_seconds"] == 1
    assert counts["request_prefill_time_seconds"] == counts["request_decode_time_seconds"] == 0
    assert counts["request_time_per_output_token_seconds"] == 0


def test_max_model_len_is_what_the_cache_can_hold() -> None:
    assert Engine(num_blocks=4).info.max_model_len == 33
    assert Engine(num_blocks=400).info.max_model_len == 512
