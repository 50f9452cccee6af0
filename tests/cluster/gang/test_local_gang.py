"""Leader and hosts over real lines, with hosts that are threads: order, agreement, deadlines, and what ends a gang."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from backends.jax.idle import idle_batch
from backends.mock import MockBackend
from cluster.gang import wire
from cluster.gang.backend import GangBackend
from cluster.gang.lines import Lines
from cluster.gang.wire import Kind
from cluster.sockets import LineAddress
from engine.backend import Backend, BackendError, BackendInfo, PendingStep, Progress, no_progress
from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_connector import KVConnector
from engine.request import EngineRequest, RequestOutput, SamplingParams
from tests.cluster.apps import eventually
from tests.cluster.gang.local_gang import LocalLauncher
from tests.engine.loopback import DecodeConnector, PrefillEngine

OPTIONS = {"backend": "mock", "num_hosts": 2, "tensor_parallel_size": 2, "max_decode_seqs": 8, "step_deadline_s": 2.0}
FEATURES: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.7, "seed": 5},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logit_bias": {5: 2.0}, "bad_words": ((7,), (8, 9)), "min_tokens": 4, "stop_token_ids": (3, 4)},
)


class Flawed(MockBackend):
    """A host on which something goes wrong in the third step."""

    def __init__(self, config: EngineConfig, flaw: Callable[[StepResult], StepResult]) -> None:
        super().__init__(config)
        self._flaw = flaw

    def dispatch(self, batch: StepBatch) -> PendingStep:
        pending = super().dispatch(batch)
        return _FlawedStep(pending, self._flaw) if batch.step >= 2 else pending


class _FlawedStep(PendingStep):
    def __init__(self, pending: PendingStep, flaw: Callable[[StepResult], StepResult]) -> None:
        self._pending = pending
        self._flaw = flaw

    def result(self) -> StepResult:
        return self._flaw(self._pending.result())


def raising(error: Exception) -> Callable[[StepResult], StepResult]:
    def flaw(_: StepResult) -> StepResult:
        raise error

    return flaw


def other_token(result: StepResult) -> StepResult:
    return StepResult(step=result.step, token_ids=result.token_ids + np.int32(1))


def hang(result: StepResult) -> StepResult:
    time.sleep(4)
    return result


class Running:
    def __init__(self, config: EngineConfig, backend: Backend, connector: KVConnector | None = None) -> None:
        self.outputs: queue.Queue[list[RequestOutput]] = queue.Queue()
        self.phases: list[str] = []
        self.core = EngineCore(config, backend, self.outputs.put, connector)
        self.core.load(lambda phase, *_: self.phases.append(phase))
        self.core.start()

    def run(self, max_tokens: int = 12) -> dict[str, list[RequestOutput]]:
        """Sends a request with each set of features; returns all outputs."""
        prompts = np.random.default_rng(1).integers(3, 300, (len(FEATURES), 40)).tolist()
        for number, (prompt, features) in enumerate(zip(prompts, FEATURES, strict=True)):
            sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **features})  # type: ignore[arg-type]
            self.core.submit(EngineRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling))
        found: dict[str, list[RequestOutput]] = {}
        while sum(outputs[-1].finish_reason is not None for outputs in found.values()) < len(FEATURES):
            for output in self.outputs.get(timeout=15):
                found.setdefault(output.request_id, []).append(output)
        return found


@contextmanager
def gang(*backends: Backend, **options: object) -> Iterator[tuple[Running, LocalLauncher, GangBackend]]:
    config = EngineConfig.from_args({**OPTIONS, **options})
    launcher = LocalLauncher(backends or [MockBackend(config) for _ in range(config.num_hosts)])
    backend = GangBackend(config, launcher)
    running = Running(config, backend)
    try:
        yield running, launcher, backend
    finally:
        running.core.stop()
        assert launcher.killed.wait(2)
        eventually(lambda: all(released.is_set() for released in launcher.released))


def failure_of(flaw: Callable[[StepResult], StepResult]) -> str:
    """How requests end when something goes wrong on host 1."""
    config = EngineConfig.from_args(OPTIONS)
    with gang(MockBackend(config), Flawed(config, flaw)) as (running, launcher, _):
        errors = {outputs[-1].error for outputs in running.run().values()}
        assert launcher.killed.wait(2)
        assert not running.core.health().healthy
    [error] = errors
    assert error is not None
    return error


def test_hosts_give_what_one_backend_gives_in_every_field() -> None:
    config = EngineConfig.from_args(OPTIONS)
    alone = Running(config, MockBackend(config))
    expected = alone.run()
    alone.core.stop()
    with gang() as (running, _, _):
        assert running.run() == expected
        assert running.phases[0] == "placing hosts"
        assert "compiling" in running.phases


def test_a_step_leaves_before_the_one_before_it_is_done() -> None:
    with gang(mock_step_ms=150) as (_, _, backend):
        started = time.monotonic()
        pending = [backend.dispatch(idle_batch()) for _ in range(3)]
        assert time.monotonic() - started < 0.1
        assert [step.result().step for step in pending] == [-1, -1, -1]
        assert time.monotonic() - started >= 0.45


def test_a_host_that_samples_something_else_ends_the_gang() -> None:
    assert failure_of(other_token) == "hosts 0 and 1 sampled different tokens in step 2"


def test_what_fails_on_one_host_is_told_in_one_line() -> None:
    assert failure_of(raising(BackendError("the device is lost"))) == "host 1 (127.0.0.1): the device is lost"
    assert "can't finish step" in failure_of(raising(ValueError("odd\nsecond line")))


def test_a_host_that_hangs_in_a_step_is_named_within_the_deadline() -> None:
    started = time.monotonic()
    assert failure_of(hang) == "host 1 of 2 did not finish step 2 within 1.8 s"
    assert time.monotonic() - started < 3.5


def test_a_host_that_dies_is_noticed_while_there_is_nothing_to_do() -> None:
    with gang() as (running, launcher, _):
        running.run()
        launcher.hosts[1].hang_up()
        eventually(lambda: not running.core.health().healthy, 2)
        assert "host 1 (127.0.0.1) has died" in running.core.health().reason
        assert launcher.killed.wait(2)


def test_an_idle_gang_lives_however_short_its_steps_must_be() -> None:
    with gang(step_deadline_s=0.2) as (running, _, _):
        time.sleep(1.5)  # hosts beat once a second
        assert running.core.health().healthy


def test_a_leader_that_stood_still_does_not_take_that_for_its_hosts_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on after a while returns from its wait at once, before what came meanwhile is there."""
    stalls: list[float] = []

    class Stalling(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            if not stalls:
                return super().select(timeout)
            time.sleep(stalls.pop())
            return []

    monkeypatch.setattr(selectors, "DefaultSelector", Stalling)
    monkeypatch.setattr("cluster.gang.host.BEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr("cluster.gang.backend.SHORTEST_SILENCE_S", 0.8)
    with gang(step_deadline_s=0.8) as (running, _, _):
        stalls.append(1.2)
        eventually(lambda: not stalls)
        time.sleep(1.5)
        assert running.core.health().healthy


def test_a_leader_whose_machine_has_vanished_is_noticed_by_what_it_does_not_acknowledge() -> None:
    with gang() as (_, launcher, _):  # keep-alive probes alone don't do it: a host has always just sent a beat
        options = [host._line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for host in launcher.hosts]
        assert options == [20_000] * 2


def test_hosts_that_are_not_alike_do_not_begin() -> None:
    config = EngineConfig.from_args(OPTIONS)
    hosts = [MockBackend(config), MockBackend(config, vocab_size=100)]
    launcher = LocalLauncher(hosts)
    backend = GangBackend(config, launcher)
    with pytest.raises(BackendError, match="not alike: vocab_size is 49152 on host 0 and 100 on host 1"):
        backend.load()
    backend.close()
    assert launcher.killed.wait(2)


def test_no_host_runs_a_program_before_all_have_compiled_theirs() -> None:
    done: list[str] = []

    class Slow(MockBackend):
        def compile(self, progress: Progress = no_progress) -> None:  # noqa: ARG002
            time.sleep(0.3)
            done.append("compiled")

        def warmup(self, progress: Progress = no_progress) -> None:
            done.append("ran")
            super().warmup(progress)

    class Quick(Slow):
        def compile(self, progress: Progress = no_progress) -> None:  # noqa: ARG002
            done.append("compiled")

    config = EngineConfig.from_args(OPTIONS)
    gang = GangBackend(config, LocalLauncher([Quick(config), Slow(config)]))
    gang.load()
    gang.warmup()
    gang.close()
    assert done == ["compiled", "compiled", "ran", "ran"]


def test_a_host_that_can_not_load_says_why() -> None:
    class Broken(MockBackend):
        def load(self, progress: Progress = no_progress) -> BackendInfo:  # noqa: ARG002
            raise BackendError("there is no model at /models/nothing")

    config = EngineConfig.from_args(OPTIONS)
    launcher = LocalLauncher([MockBackend(config), Broken(config)])
    backend = GangBackend(config, launcher)
    with pytest.raises(BackendError, match=r"host 1 \(127.0.0.1\): there is no model at /models/nothing"):
        backend.load()
    backend.close()


class Pretender(LocalLauncher):
    """Its second host is a bare line, over which a test says what it likes."""

    def start(self, address: LineAddress, progress: Progress) -> None:
        self.stranger = socket.create_connection((address.host, address.port))
        self.stranger.sendall(wire.encode(Kind.HELLO, 0, wire.pack(("wrong", 0))))
        self._backends = self._backends[:1]
        super().start(address, progress)
        self.line = socket.create_connection((address.host, address.port))
        self.line.sendall(wire.encode(Kind.HELLO, 0, wire.pack((address.secret, 1))) + self.says)

    says = b""


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (wire.encode(Kind.DONE, 1, b"x")[:-1] + b"y", "can't be trusted: message 1 is damaged"),
        (wire.encode(Kind.DONE, 7, b""), "can't be trusted: it answered command 7, which nobody waits for"),
        (wire.encode(Kind.STEP, 1, b""), "can't be trusted: it sent a message of kind STEP"),
    ],
    ids=["damaged", "unasked", "a command"],
)
def test_an_answer_that_makes_no_sense_ends_the_gang(says: bytes, reason: str) -> None:
    config = EngineConfig.from_args(OPTIONS)
    launcher = Pretender([MockBackend(config), MockBackend(config)])
    launcher.says = says
    backend = GangBackend(config, launcher)
    with pytest.raises(BackendError, match=reason):
        backend.load()
    assert launcher.killed.wait(2)
    assert launcher.stranger.recv(1) == b""  # it was sent away
    launcher.line.close()
    backend.close()


def test_a_stranger_that_says_little_by_little_does_not_keep_the_hosts_waiting() -> None:
    here, there = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                there.sendall(b"\0")

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.receive_hello(here, 0.3)
    assert time.monotonic() - started < 0.6
    stop.set()
    thread.join()
    here.close()
    there.close()


def test_strangers_without_end_do_not_make_hosts_that_never_come_come_later() -> None:
    lines = Lines("127.0.0.1", 2, silence_s=1.0, on_failure=lambda: None)
    stop = threading.Event()

    def knock() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                socket.create_connection((lines.address.host, lines.address.port)).close()

    thread = threading.Thread(target=knock)
    thread.start()
    started = time.monotonic()
    with pytest.raises(BackendError, match=r"hosts 0, 1 did not connect within 0.3 s"):
        lines.accept(0.3)
    assert time.monotonic() - started < 1
    stop.set()
    thread.join()
    lines.close(1)


def test_hosts_hear_of_the_end_at_once_however_long_it_takes_to_kill_them() -> None:
    """Ray kills nobody while its control store is away."""
    config = EngineConfig.from_args(OPTIONS)

    class Slow(LocalLauncher):
        def kill(self) -> None:
            if not self.killed.is_set():
                self.released_first = self.released[0].wait(5)
            super().kill()

    launcher = Slow([MockBackend(config), Flawed(config, raising(BackendError("the device is lost")))])
    running = Running(config, GangBackend(config, launcher))
    assert {outputs[-1].error for outputs in running.run().values()} == {"host 1 (127.0.0.1): the device is lost"}
    assert launcher.killed.wait(2)
    assert launcher.released_first
    running.core.stop()


def test_kv_goes_from_gang_to_gang() -> None:
    config = EngineConfig.from_args({**OPTIONS, "max_num_batched_tokens": 16})
    launchers = [LocalLauncher([MockBackend(config) for _ in range(2)]) for _ in range(2)]
    prefill = PrefillEngine(config, GangBackend(config, launchers[0]))
    backend, connector = GangBackend(config, launchers[1]), DecodeConnector(prefill)
    connector.receiver = backend
    decode = Running(config, backend, connector)
    alone = Running(config, MockBackend(config))
    tokens = {name: [t for o in outputs for t in o.token_ids] for name, outputs in decode.run().items()}
    assert tokens == {name: [t for o in outputs for t in o.token_ids] for name, outputs in alone.run().items()}
    assert decode.core.metrics().values["kv_imported_tokens"] == 3 * 40  # prompt logprobs have to be computed here
    assert decode.core.metrics().values["kv_import_failures"] == 0
    left = [shelf for launcher in launchers for host in launcher.hosts for shelf in (host.reads, host.payloads)]
    eventually(lambda: not any(map(len, left)), 2)
    for core in (decode.core, alone.core, prefill.core):
        core.stop()
    prefill.stop()


def test_commands_out_of_order_are_refused_by_the_host() -> None:
    with gang() as (running, _, backend):
        lines = backend._lines
        assert lines is not None
        lines._next_number += 1
        running.core.submit(
            EngineRequest(request_id="r", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=1))
        )
        assert "came in place of" in (running.outputs.get(timeout=10)[-1].error or "")
