"""GangBackend: several hosts as one Backend. The engine's replica schedules; the hosts load, compile and run alike."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from cluster.gang import codec, wire
from cluster.gang.kv import GangBlocks, check_payload
from cluster.gang.lines import Call, Lines
from cluster.gang.wire import Kind, Message
from cluster.sockets import LineAddress
from engine.backend import Backend, BackendError, BackendInfo, PendingStep, Progress, no_progress
from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVFormat, KVPayload, PendingBlocks

CONNECT_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 7200.0
"""A large model may come from a hub first. A host that hangs meanwhile is noticed by its silence, not by this."""
SHORTEST_SILENCE_S, SILENCE_S = 3.0, 10.0
LOADING_SILENCE_S = 60.0
"""How long a host may not be heard: they send a beat each second, which compiling a large program can hold up."""
CLOSE_TIMEOUT_S = 5.0
STEP_SHARE = 0.9
"""Of step_deadline_s, after which the gang itself says which host is late; later, the engine only knows that one is."""


class Launcher(ABC):
    """Who starts and ends the processes of a gang."""

    leader_host: str
    """This process' address as the hosts reach it."""

    @abstractmethod
    def start(self, address: LineAddress, progress: Progress) -> None:
        """Starts one process for each host, each of which connects to `address` as `cluster.gang.host.Host`.

        Raises:
            BackendError: there is no place for them, or one does not start; one line.
        """

    @abstractmethod
    def deliver(self, key: int, payload: KVPayload) -> None:
        """Leaves KV with every host (`Host.payloads`), to be written by a command that names the key. Does not wait.

        Raises:
            KVLostError: there is no room for it.
        """

    @abstractmethod
    def collect(self, key: int, timeout_s: float) -> Sequence[KVBlocks]:
        """What all hosts have read under a key (`Host.shares`). Any thread may call it, once for each key.

        Raises:
            BackendError: a host did not give its share in time; one line.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends all processes at once, wherever they hang, and gives their place back. May be called more than once."""


class GangBackend(Backend):
    def __init__(self, config: EngineConfig, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._lines: Lines | None = None
        self._compilations = 0
        self._kv_format: KVFormat | None = None
        self._keys = itertools.count()
        self._unwanted: deque[int] = deque()  # keys of reads that nobody looks at

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        lines = self._lines = Lines(
            self._launcher.leader_host,
            self._config.num_hosts,
            silence_s=LOADING_SILENCE_S,
            on_failure=self._launcher.kill,
        )
        self._launcher.start(lines.address, progress)
        lines.accept(CONNECT_TIMEOUT_S)
        answers = lines.send(Kind.LOAD, b"").result(LOAD_TIMEOUT_S, "loading", progress)
        if len({answer.checksum for answer in answers}) > 1:
            raise lines.failed(f"the hosts are not alike: {_differences(answers)}")
        if not self._config.warmup:
            lines.silence_s = self._silence_s
        info, self._kv_format = codec.unpack_info(answers[0].content())
        return info

    def warmup(self, progress: Progress = no_progress) -> None:
        lines = self._started
        lines.send(Kind.WARMUP, b"").result(LOAD_TIMEOUT_S, "warm-up", progress)
        lines.silence_s = self._silence_s

    def dispatch(self, batch: StepBatch) -> PendingStep:
        return _GangStep(self, batch.step, self._started.send(Kind.STEP, codec.pack_batch(batch)))

    def collect(self, step: int, call: Call) -> StepResult:
        """The step's result, when all hosts have computed the same.

        Raises:
            BackendError: they have not, or not in time.
        """
        answers = call.result(STEP_SHARE * self._config.step_deadline_s, f"step {step}")
        reports = [answer.content() for answer in answers]
        for rank, (ran, tokens, compilations, _) in enumerate(reports):
            if ran != call.checksum:
                raise self._started.failed(f"host {rank} ran another step {step} than it was sent")
            if tokens != reports[0][1]:
                raise self._started.failed(f"hosts 0 and {rank} sampled different tokens in step {step}")
            self._compilations = max(self._compilations, compilations)
        return codec.unpack_result(reports[0][3])

    def kv_format(self) -> KVFormat:
        return self._kv_format or super().kv_format()

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:
        key = next(self._keys)
        unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]
        command = wire.pack((key, [int(block) for block in block_ids], num_tokens, offset, unwanted))
        self._started.send(Kind.READ_BLOCKS, command, answered=False)
        blocks = GangBlocks(partial(self._launcher.collect, key, STEP_SHARE * self._config.step_deadline_s))
        weakref.finalize(blocks, self._unwanted.append, key)
        return blocks

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        check_payload(payload.shares(), self.kv_format())  # here, where it may still be refused, and not on some host
        key = next(self._keys)
        self._launcher.deliver(key, payload)
        command = wire.pack((key, [int(block) for block in block_ids], offset))
        self._started.send(Kind.WRITE_BLOCKS, command, answered=False)

    @property
    def _started(self) -> Lines:
        if self._lines is None:
            raise BackendError("the gang is not loaded")
        return self._lines

    @property
    def _silence_s(self) -> float:
        return max(SHORTEST_SILENCE_S, min(SILENCE_S, self._config.step_deadline_s))

    @property
    def problem(self) -> str | None:
        return None if self._lines is None else self._lines.problem

    @property
    def compilations_after_warmup(self) -> int:
        return self._compilations

    def close(self) -> None:
        if self._lines is None:
            return
        self._lines.retire()
        self._launcher.kill()
        self._lines.close(CLOSE_TIMEOUT_S)


class _GangStep(PendingStep):
    def __init__(self, gang: GangBackend, step: int, call: Call) -> None:
        self._gang = gang
        self._step = step
        self._call = call

    def result(self) -> StepResult:
        return self._gang.collect(self._step, self._call)


def _differences(answers: Sequence[Message]) -> str:
    """What hosts say differently of themselves."""
    records: list[dict[str, Any]] = [answer.content() for answer in answers]
    first = records[0]
    for rank, record in enumerate(records):
        for name, value in record.items():
            if value != first[name]:
                return f"{name} is {first[name]} on host 0 and {value} on host {rank}"
    return "their answers differ"
