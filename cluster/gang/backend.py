"""GangBackend: several hosts as one Backend. The engine's replica schedules; the hosts load, compile and run alike."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from cluster.gang import codec, wire
from cluster.gang.kv import GangBlocks, GangPayload
from cluster.gang.launcher import Launcher
from cluster.gang.lines import Call, Lines
from cluster.gang.unwanted import Unwanted
from cluster.gang.wire import Kind
from engine.backend import Backend, BackendError, BackendInfo, PendingStep, Progress, no_progress
from engine.batch import StepBatch, StepResult
from engine.config import EngineConfig
from engine.errors import first_line
from engine.kv_blocks import KVFormat, KVLateError, KVLostError, KVPayload, PendingBlocks

CONNECT_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 7200.0
"""A large model may come from a hub first. A host that hangs meanwhile is noticed by its silence, not by this."""
SHORTEST_SILENCE_S, SILENCE_S = 3.0, 10.0
LOADING_SILENCE_S = 60.0
"""How long a host may not be heard: they send a beat each second, which compiling a large program can hold up."""
CLOSE_TIMEOUT_S = 5.0
ANSWER_S = 2.0
"""Longer than hosts have for KV to come: their word that it has, or has not, takes a moment."""
STEP_SHARE = 0.9
"""Of step_deadline_s, after which the gang itself says which host is late; later, the engine only knows that one is."""


class GangBackend(Backend):
    def __init__(self, config: EngineConfig, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._lines: Lines | None = None
        self._compilations = 0
        self._kv_format: KVFormat | None = None
        self._heads: Sequence[range] = ()  # of each host
        self._keys = itertools.count()
        self._unwanted: Unwanted | None = None

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
        records, self._heads = zip(*(codec.unpack_host(answer.content()) for answer in answers), strict=True)
        if difference := _difference(records):
            raise lines.failed(f"the hosts are not alike: {difference}")
        if not self._config.warmup:
            lines.silence_s = self._silence_s
        self._unwanted = Unwanted(self._drop)
        info, self._kv_format = codec.unpack_info(records[0])
        return info

    def warmup(self, progress: Progress = no_progress) -> None:
        lines = self._started
        # All of them first: in a program, a host that had it from a cache waits for the others for half a minute only.
        lines.send(Kind.COMPILE, b"").result(LOAD_TIMEOUT_S, "compiling", progress)
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

    # -- KV

    @property
    def num_hosts(self) -> int:
        return self._config.num_hosts

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:
        key = next(self._keys)
        command = wire.pack((key, [int(block) for block in block_ids], num_tokens, offset))
        self._started.send(Kind.READ_BLOCKS, command, answered=False)
        timeout_s = STEP_SHARE * self._config.step_deadline_s
        return GangBlocks(self._launcher, key, timeout_s, partial(self._keeper.read, key))

    def receive_blocks(self, payloads: Sequence[KVPayload], timeout_s: float) -> Sequence[KVPayload]:
        keys = [next(self._keys) for _ in payloads]
        by_host = [[payload.part(heads or range(1)) for payload in payloads] for heads in self._heads]
        here = [GangPayload(key, partial(self._keeper.received, key)) for key in keys]
        hosts = self._launcher.deliver(keys, by_host, timeout_s)
        done, late = concurrent.futures.wait(hosts, timeout_s + ANSWER_S, concurrent.futures.FIRST_EXCEPTION)
        errors = [error for host in done if (error := host.exception()) is not None]
        if errors or late:
            _keep_until(hosts, here)  # a host that is late would put it on its shelf after it was told to drop it
            raise _failure(errors, timeout_s)
        return here

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        if not isinstance(payload, GangPayload):
            raise KVLostError("KV was not brought to the hosts of the gang before it was to be written")
        command = wire.pack((payload.key, [int(block) for block in block_ids], offset))
        self._started.send(Kind.WRITE_BLOCKS, command, answered=False)
        payload.written()

    def _drop(self, read: Sequence[int], received: Sequence[int]) -> None:
        self._started.send(Kind.DROP_BLOCKS, wire.pack((read, received)), answered=False)

    @property
    def _keeper(self) -> Unwanted:
        if self._unwanted is None:
            raise BackendError("the gang is not loaded")
        return self._unwanted

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
        if self._unwanted is not None:
            self._unwanted.close()
        self._launcher.kill()
        self._lines.close(CLOSE_TIMEOUT_S)


class _GangStep(PendingStep):
    def __init__(self, gang: GangBackend, step: int, call: Call) -> None:
        self._gang = gang
        self._step = step
        self._call = call

    def result(self) -> StepResult:
        return self._gang.collect(self._step, self._call)


def _failure(errors: Sequence[BaseException], timeout_s: float) -> KVLostError:
    """Why KV is not with all hosts. A new error: what a future holds, and came through who has the future, is a cycle,
    which an idle engine's Python would keep with all KV that it refers to."""
    if not errors:
        return KVLateError(f"KV was not with all hosts within {timeout_s:g} s")
    kind = KVLateError if isinstance(errors[0], KVLateError) else KVLostError
    return kind(first_line(errors[0]))


def _keep_until(hosts: Sequence[Future[None]], payloads: list[GangPayload]) -> None:
    """Lets go of payloads when all hosts have said what became of them."""
    left = itertools.count(len(hosts) - 1, -1)
    lock = threading.Lock()

    def ended(_: Future[None]) -> None:
        with lock:
            is_last = next(left) == 0
        if is_last:
            payloads.clear()

    for host in hosts:
        host.add_done_callback(ended)


def _difference(records: Sequence[Mapping[str, Any]]) -> str:
    """What hosts say differently of themselves."""
    for rank, record in enumerate(records):
        for name, value in record.items():
            if value != records[0][name]:
                return f"{name} is {records[0][name]} on host 0 and {value} on host {rank}"
    return ""
