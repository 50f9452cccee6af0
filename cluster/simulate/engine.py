"""SimulatedEngine: EngineCore's loop in virtual time, around the real Scheduler.

The order of things is EngineCore's: requests that have come are taken in, a step is scheduled and dispatched, and then
the step before it is waited for (Capabilities.overlap). tests/cluster/simulate compares the two step by step. There is
no device: a step takes as long as its cost says, and every sampled token is the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.simulate.kv import NoBlocks
from cluster.simulate.models import EngineModel
from cluster.simulate.timeline import Timeline
from engine.batch import Int32, StepBatch, StepResult
from engine.core import QueueFullError
from engine.kv_connector import KVConnector
from engine.kv_exports import KVExports
from engine.kv_imports import KVExchange
from engine.metrics import EngineMetrics, MetricsSnapshot
from engine.news import CacheJournal, EngineNews
from engine.request import EngineRequest, RequestOutput
from engine.running import RequestState
from engine.scheduler import ScheduledStep, Scheduler

_WORTH_IT = 4
"""Fewer steps are taken one by one."""

SAMPLED = 1
"""The token that is always sampled. Prompts that go on with an answer are made of it, too."""


@dataclass(frozen=True, slots=True)
class _Dispatched:
    step: ScheduledStep
    done_at: float


@dataclass(frozen=True, slots=True)
class _Coast:
    """Decode steps of the same requests, from the one that is awaited on."""

    times: list[float]  # when each step is done; the last two are of steps that are planned meanwhile
    costs: list[float]  # of the steps that are planned meanwhile

    @property
    def count(self) -> int:
        """Steps that are collected in it."""
        return len(self.costs)


class SimulatedEngine:
    def __init__(
        self,
        model: EngineModel,
        timeline: Timeline,
        emit: Callable[[list[RequestOutput]], None],
        *,
        journal: bool = False,
        connector: KVConnector | None = None,
        coasts: bool = True,
    ) -> None:
        """
        Args:
            emit: called as EngineCore calls it: once per step, with the outputs of all requests.
            journal: whether somebody takes the news, which tell what changes in the cache.
            connector: brings KV from elsewhere and takes it there.
            coasts: whether steps that are all alike are taken at once; nothing but the time this takes depends on it.
        """
        self._model = model
        self._timeline = timeline
        self._emit = emit
        self.metrics = EngineMetrics(slo_ttft_ms=model.slo_ttft_ms, slo_tpot_ms=model.slo_tpot_ms)
        self._journal = CacheJournal() if journal else None
        self._exports: KVExports | None = None
        exchange = None
        if connector is not None:
            connector.attach(self._wake)
            cache, size = NoBlocks(), model.info.block_size
            exchange = KVExchange(connector=connector, write_blocks=cache.write_blocks)
            self._exports = KVExports(connector, cache, block_size=size, metrics=self.metrics)
        self._scheduler = Scheduler(
            model.limits, model.info, self.metrics, clock=timeline, journal=self._journal, exchange=exchange
        )
        self._live: dict[str, RequestState] = {}
        self._submitted: list[RequestState] = []
        self._in_flight: _Dispatched | None = None  # nobody waits for it yet
        self._awaited: _Dispatched | None = None
        self.device_free_at = 0.0  # when all dispatched steps are done
        self._is_awake = False
        self._is_stopped = False
        self._coasts = coasts
        self._coast: _Coast | None = None
        self.coasts_until = math.inf
        """Outputs of a time from then on are emitted at their time; those before may come later, several as one."""
        self._sampled: Int32 = np.full(model.limits.running, SAMPLED, np.int32)
        self.busy_s = 0.0  # of the device
        self.num_steps = 0
        self.num_tokens = 0  # computed: prompts and decoding

    @property
    def num_live(self) -> int:
        return len(self._live)

    def snapshot(self) -> MetricsSnapshot:
        """The metrics, as EngineCore gives them."""
        if self._coast is not None:
            self._land()
        metrics, running = self.metrics, self._scheduler.num_running
        metrics.num_requests_running = running
        metrics.num_requests_waiting = max(0, len(self._live) - running)
        waiting = [state for state in self._live.values() if not state.first_token_time]
        metrics.num_tokens_waiting = sum(self._scheduler.num_left(state) for state in waiting)
        metrics.kv_cache_usage_perc = self._scheduler.kv_usage
        return metrics.snapshot()

    def news(self) -> EngineNews:
        """What there is to tell since the last call, as EngineCore tells it."""
        load = self._scheduler.load
        load = replace(load, waiting=max(load.waiting, len(self._live) - load.running))
        return EngineNews(load=load, cache={} if self._journal is None else self._journal.take())

    def submit(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            QueueFullError: as many as allowed are here.
        """
        if len(self._live) >= self._model.limits.live:
            raise QueueFullError(f"{len(self._live)} requests are running and waiting")
        info = self._model.info
        state = RequestState(
            request, eos_token_ids=info.eos_token_ids, max_model_len=info.max_model_len, clock=self._timeline
        )
        self._live[state.request_id] = state
        self._submitted.append(state)
        if self._coast is not None:
            self._land()
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._timeline.at(self._timeline.now, self._turn)

    def stop(self) -> list[EngineRequest]:
        """The engine is gone at once. Returns its requests, with the tokens that have left it."""
        if self._coast is not None:
            self._land()
        self._is_stopped = True
        self.busy_s -= max(0.0, self.device_free_at - self._timeline.now)  # of steps that it does not come to
        live, self._live = list(self._live.values()), {}
        return [_with_outputs(state) for state in live]

    # -- the loop

    def _turn(self) -> None:
        """From one wait of EngineCore's thread to its next one."""
        if self._is_stopped:
            return
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            outputs = self._scheduler.collect(awaited.step, self._result(awaited.step.batch))
            if self._exports is not None:
                self._exports.after_collect(self._scheduler.take_computed())
            self._deliver(outputs)
        while True:
            outputs = self._take_in() + self._scheduler.take_kv_events()
            scheduled = self._scheduler.schedule()
            pending = self._dispatch(scheduled)
            if self._model.info.capabilities.overlap:
                ready, self._in_flight = self._in_flight, pending
            else:
                ready = pending
            self._deliver(outputs)
            if ready is not None:
                self._awaited = ready
                self._await()
                return
            if pending is None:
                break
        if self._scheduler.has_work and not self._scheduler.awaits_kv:
            raise RuntimeError("the scheduler has requests and nothing to do")
        self._is_awake = False
        if self._submitted:  # by whoever heard of the last outputs
            self._wake()

    # -- many steps at once

    def _await(self) -> None:
        """Plans the next turn, or, where the steps until then are all alike, the last of them."""
        assert self._awaited is not None
        awaited, in_flight = self._awaited, self._in_flight
        count = 0
        if in_flight is not None and self._coasts:
            count = self._scheduler.steady_steps((awaited.step, in_flight.step), SAMPLED)
        if in_flight is None or count < _WORTH_IT:
            self._timeline.at(awaited.done_at, self._turn)
            return
        coast = self._coast = self._plan_coast(awaited, in_flight, count)
        self._timeline.at(coast.times[coast.count - 1], lambda: self._land_if(coast))

    def _plan_coast(self, awaited: _Dispatched, in_flight: _Dispatched, count: int) -> _Coast:
        clock, num_rows = self._model.clock, len(in_flight.step.rows)
        kv_tokens = int(in_flight.step.batch.kv_lens.sum())
        times, costs = [awaited.done_at, in_flight.done_at], []
        for taken in range(1, count + 1):
            costs.append(clock.decode_s(num_rows, kv_tokens + taken * num_rows))
            times.append(times[-1] + costs[-1])
            if times[taken - 1] >= self.coasts_until:
                break
        return _Coast(times, costs)

    def _land_if(self, coast: _Coast) -> None:
        if self._coast is coast:
            self._land()

    def _land(self) -> None:
        """Takes the steps that are over by now, and goes on step by step."""
        coast, self._coast = self._coast, None
        assert coast is not None
        count = min(coast.count, bisect_right(coast.times, self._timeline.now))
        if count:
            assert self._awaited is not None
            assert self._in_flight is not None
            in_flight = (self._awaited.step, self._in_flight.step)
            num_rows = len(in_flight[0].rows)
            steps, outputs = self._scheduler.fast_forward(in_flight, SAMPLED, coast.times[:count])
            self._awaited = _Dispatched(steps[0], coast.times[count])
            self._in_flight = _Dispatched(steps[1], coast.times[count + 1])
            self.device_free_at = coast.times[count + 1]
            for cost_s in coast.costs[:count]:
                self.busy_s += cost_s
            self.num_steps += count
            self.num_tokens += count * num_rows
            self._deliver(outputs)
        assert self._awaited is not None
        self._timeline.at(self._awaited.done_at, self._turn)

    # -- a turn's parts

    def _take_in(self) -> list[RequestOutput]:
        submitted, self._submitted = self._submitted, []
        outputs = []
        for state in submitted:
            self._scheduler.add(state)
            reason = state.finished_before_start()
            if reason is not None:
                self._scheduler.finish(state)
                outputs.append(RequestOutput(request_id=state.request_id, finish_reason=reason))
        return outputs

    def _dispatch(self, step: ScheduledStep | None) -> _Dispatched | None:
        if self._exports is not None:
            self._exports.before_step(self._scheduler.take_evicted())
        if step is None:
            return None
        cost_s = self._model.clock.step_s(step.batch)
        self.device_free_at = max(self.device_free_at, self._timeline.now) + cost_s
        self.busy_s += cost_s
        self.num_steps += 1
        self.num_tokens += step.batch.num_tokens
        if self._exports is not None:
            self._exports.after_dispatch(step.chunks)
        return _Dispatched(step, self.device_free_at)

    def _result(self, batch: StepBatch) -> StepResult:
        sampled = self._sampled[: batch.num_rows]
        if not batch.is_decode_only:
            sampled = np.where(batch.samples, sampled, np.int32(-1))
        return StepResult(step=batch.step, token_ids=sampled)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        outputs = [output for output in outputs if output.request_id in self._live]
        for output in outputs:
            if output.finish_reason is not None:
                del self._live[output.request_id]
        if outputs:
            self._emit(outputs)


def _with_outputs(state: RequestState) -> EngineRequest:
    return replace(state.request, output_token_ids=tuple(state.token_ids[state.prompt_len :]))
