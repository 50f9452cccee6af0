"""EngineCore: the loop that brings requests, scheduler and backend together (schedule → dispatch → collect → emit).

    core = EngineCore(config, backend, emit)   # called with list[RequestOutput] on the engine's thread
    info = core.load(progress)                 # BackendError; reads weights, compiles (config.warmup)
    core.start()                               # the loop, on a thread of its own
    core.submit(EngineRequest(...))            # any thread; InvalidRequestError, QueueFullError, EngineStoppedError
    core.abort(request_id)                     # any thread; unknown ids are ignored
    core.health()                              # EngineHealth(healthy, reason)
    core.metrics()                             # MetricsSnapshot (picklable)
    core.stop()                                # ends what is left with FinishReason.ERROR, joins, closes the backend

Every accepted request gets outputs until exactly one with a finish_reason (an aborted one: ABORT). `emit` is called at
most once per step, with the outputs of all requests of that step, and must not block.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.backend import Backend, BackendError, BackendInfo, PendingStep, Progress, no_progress
from engine.config import EngineConfig
from engine.kv_connector import KVConnector
from engine.kv_exports import KVExports
from engine.kv_imports import KVExchange
from engine.limits import Limits, usable
from engine.metrics import EngineMetrics, MetricsSnapshot
from engine.news import CacheJournal, EngineNews
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.running import RequestState, Status
from engine.scheduler import ScheduledStep, Scheduler
from engine.validation import InvalidRequestError, validate

__all__ = ["EngineCore", "EngineHealth", "EngineStoppedError", "InvalidRequestError", "QueueFullError"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 5.0


class QueueFullError(RuntimeError):
    """As many requests as allowed are running and waiting; try again later."""


class EngineStoppedError(RuntimeError):
    """The engine has failed, was stopped, or was not started. The message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    healthy: bool
    reason: str = ""  # one line, when not healthy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loaded:
    info: BackendInfo
    limits: Limits
    scheduler: Scheduler
    exports: KVExports | None  # where there is a connector


class EngineCore:
    """One engine: a backend, a scheduler, and the thread that drives them.

    Args:
        connector: brings KV from elsewhere and takes it there; None: every prompt is computed here, for here.
        journal: follows the prefix cache, for `news`; who gives one has to take its pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        emit: Callable[[list[RequestOutput]], None],
        connector: KVConnector | None = None,
        journal: CacheJournal | None = None,
    ) -> None:
        self._config = config
        self._backend = backend
        self._emit = emit
        self._connector = connector
        self._journal = journal
        self._metrics = EngineMetrics(slo_ttft_ms=config.slo_ttft_ms, slo_tpot_ms=config.slo_tpot_ms)
        self._loaded: _Loaded | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Shared between threads, under the condition's lock:
        self._changed = threading.Condition()
        self._live: dict[str, RequestState] = {}  # in the order of submission, so of their deadlines
        self._submitted: list[RequestState] = []
        self._aborted: dict[str, FinishReason] = {}
        self._down = "the engine is not started"  # why it takes no requests; empty when it does
        self._progress_at = time.monotonic()  # last step, or when work appeared
        self._at_rest = True  # nothing to compute before something changes
        self._kv_news = False
        # The engine thread's own:
        self._in_flight: tuple[ScheduledStep, PendingStep] | None = None

    @property
    def info(self) -> BackendInfo:
        """The loaded backend; `max_model_len` is what really fits the KV cache."""
        return self._ready.info

    @property
    def _ready(self) -> _Loaded:
        if self._loaded is None:
            raise EngineStoppedError("the engine is not loaded")
        return self._loaded

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        """Loads the backend and runs its warm-up if configured.

        Raises:
            BackendError: says what to change.
        """
        info = self._backend.load(progress)
        if self._config.warmup:
            self._backend.warmup(progress)
        limits = Limits.of(self._config, info)
        info = usable(info, limits)
        exchange, exports = self._attach(info, self._connector) if self._connector else (None, None)
        scheduler = Scheduler(limits, info, self._metrics, exchange=exchange)
        self._loaded = _Loaded(info=info, limits=limits, scheduler=scheduler, exports=exports)
        return info

    def _attach(self, info: BackendInfo, connector: KVConnector) -> tuple[KVExchange, KVExports]:
        self._backend.kv_format()  # refuses if the backend can't exchange KV
        connector.attach(self._wake)
        exchange = KVExchange(connector=connector, write_blocks=self._backend.write_blocks)
        return exchange, KVExports(connector, self._backend, block_size=info.block_size, metrics=self._metrics)

    def start(self) -> None:
        """Starts the loop; `load` comes first."""
        _ = self._ready
        self._down = ""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the loop and all requests; closes the backend, unless a step hangs in it for over `timeout_s`."""
        with self._changed:
            self._down = self._down or "the engine was stopped"
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the engine's thread did not end within %g s: a backend step hangs", timeout_s)
            self._end_all(self._down)
            return
        if self._connector is not None:
            self._connector.close()
        self._backend.close()

    # -- any thread

    def submit(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: this model or backend can't serve it.
            QueueFullError: too many requests are waiting.
            EngineStoppedError: the engine has failed or was stopped.
        """
        info, limits = self._ready.info, self._ready.limits
        validate(request, info, longest_prompt=limits.longest_prompt)
        state = RequestState(request, eos_token_ids=info.eos_token_ids, max_model_len=info.max_model_len)
        with self._changed:
            if self._down:
                raise EngineStoppedError(self._down)
            if state.request_id in self._live:
                raise InvalidRequestError("request_id", f"request_id {state.request_id!r} is in use: choose another")
            if len(self._live) >= limits.live:
                raise QueueFullError(
                    f"{len(self._live)} requests are running and waiting, which is the limit: try again later, "
                    "or serve with a larger max_queued_requests"
                )
            if self._at_rest:
                self._at_rest = False
                self._progress_at = time.monotonic()
            state.deadline = time.monotonic() + self._config.request_timeout_s
            self._live[state.request_id] = state
            self._submitted.append(state)
            self._changed.notify()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request within one step, wherever it is, and frees everything it holds.

        Args:
            reason: STOP if its reader has all that it wanted, as when a stop string came.
        """
        with self._changed:
            if request_id in self._live:
                self._aborted[request_id] = reason
                self._at_rest = False
                self._changed.notify()

    def health(self) -> EngineHealth:
        """Unhealthy if the engine is down, or had work and made no step within `step_deadline_s`."""
        with self._changed:
            # At rest with live requests, it waits for KV from elsewhere, for which connectors have deadlines.
            stalled_s = time.monotonic() - self._progress_at if self._live and not self._at_rest else 0.0
            down = self._down or self._backend.problem
        if down:
            return EngineHealth(healthy=False, reason=down)
        if stalled_s > self._config.step_deadline_s:
            limit = self._config.step_deadline_s
            return EngineHealth(healthy=False, reason=f"no step for {stalled_s:.1f} s, limit {limit:g} s")
        return EngineHealth(healthy=True)

    def metrics(self) -> MetricsSnapshot:
        """The engine's metrics as they are now."""
        metrics = self._metrics
        if self._loaded is not None:
            scheduler = self._loaded.scheduler
            metrics.num_requests_running = running = scheduler.num_running
            metrics.num_requests_waiting = max(0, len(self._live) - running)
            metrics.num_tokens_waiting = self._tokens_waiting(scheduler)
            metrics.kv_cache_usage_perc = scheduler.kv_usage
            metrics.compilations_after_warmup = self._backend.compilations_after_warmup
        return metrics.snapshot()

    def _tokens_waiting(self, scheduler: Scheduler) -> int:
        with self._changed:
            live = list(self._live.values())
        return sum(scheduler.num_left(state) for state in live if not state.first_token_time)

    def news(self) -> EngineNews:
        """What there is to tell since the last call. For `emit`, as it is the engine thread's to say."""
        load = self._ready.scheduler.load
        waiting = len(self._live) - load.running  # with those that came during the step
        if waiting > load.waiting:
            load = replace(load, waiting=waiting)
        return EngineNews(load=load, cache=self._journal.take() if self._journal is not None else {})

    def _wake(self) -> None:
        """The connector has events."""
        with self._changed:
            self._kv_news = True
            self._changed.notify()

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
            reason = self._down
        except BackendError as error:
            reason = " ".join(str(error).split())
            logger.error("the engine stops: %s", reason)
        except Exception as error:
            reason = f"internal error: {type(error).__name__}: {error}".splitlines()[0]
            logger.exception("the engine stops: %s", reason)
        self._end_all(reason)

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False when the engine was stopped."""
        with self._changed:
            while self._at_rest and not self._kv_news and not self._down:
                oldest = next(iter(self._live.values()), None)
                wait_s = min(_IDLE_WAIT_S, oldest.deadline - time.monotonic()) if oldest else _IDLE_WAIT_S
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            if self._at_rest:
                self._at_rest = False
                self._progress_at = time.monotonic()
            self._kv_news = False
            return not self._down

    def _step(self) -> None:
        loaded = self._ready
        scheduler = loaded.scheduler
        outputs = self._take_in(scheduler) + scheduler.take_kv_events()
        pending = self._dispatch(loaded, scheduler.schedule())
        if loaded.info.capabilities.overlap:
            ready, self._in_flight = self._in_flight, pending
        else:
            ready = pending
        if ready is not None:
            outputs += scheduler.collect(ready[0], ready[1].result())
            if loaded.exports is not None:
                loaded.exports.after_collect(scheduler.take_computed())
        elif pending is None and scheduler.has_work and not scheduler.awaits_kv:
            raise RuntimeError("the scheduler has requests and nothing to do")
        self._deliver(outputs, at_rest=pending is None and ready is None)

    def _dispatch(self, loaded: _Loaded, step: ScheduledStep | None) -> tuple[ScheduledStep, PendingStep] | None:
        """Dispatches a step, and reads of the KV that it overwrites and computes."""
        if loaded.exports is not None:
            loaded.exports.before_step(loaded.scheduler.take_evicted())
        if step is None:
            return None
        pending = self._backend.dispatch(step.batch)
        if loaded.exports is not None:
            loaded.exports.after_dispatch(step.chunks)
        return step, pending

    def _take_in(self, scheduler: Scheduler) -> list[RequestOutput]:
        """Applies what other threads asked for, and deadlines. Returns the outputs of requests that ended by it."""
        now = time.monotonic()
        with self._changed:
            submitted, self._submitted = self._submitted, []
            aborted = [(self._live[name], reason) for name, reason in self._aborted.items() if name in self._live]
            self._aborted = {}
            expired = list(itertools.takewhile(lambda state: state.deadline <= now, self._live.values()))
        outputs = []
        for state in submitted:
            scheduler.add(state)
            reason = state.finished_before_start()
            if reason is not None:
                outputs.append(self._end(scheduler, state, reason))
        outputs += [self._end(scheduler, s, reason) for s, reason in aborted if s.status is not Status.FINISHED]
        message = f"the request did not end within {self._config.request_timeout_s:g} s (request_timeout_s)"
        late = [state for state in expired if state.status is not Status.FINISHED]
        return outputs + [self._end(scheduler, state, FinishReason.TIMEOUT, message) for state in late]

    def _end(
        self, scheduler: Scheduler, state: RequestState, reason: FinishReason, error: str | None = None
    ) -> RequestOutput:
        scheduler.finish(state)
        return self._final_output(state, reason, error)

    def _final_output(self, state: RequestState, reason: FinishReason, error: str | None = None) -> RequestOutput:
        self._metrics.request_ended(state.record(), reason, time.time())
        return RequestOutput(
            request_id=state.request_id,
            finish_reason=reason,
            stop_token_id=state.token_ids[-1] if reason is FinishReason.STOP else None,
            num_cached_tokens=state.num_cached_tokens,
            error=error,
        )

    def _deliver(self, outputs: list[RequestOutput], *, at_rest: bool) -> None:
        with self._changed:
            self._progress_at = time.monotonic()
            self._at_rest = at_rest and not self._submitted and not self._aborted
            outputs = [output for output in outputs if output.request_id in self._live]  # all gone if stop() gave up
            for output in outputs:
                if output.finish_reason is not None:
                    del self._live[output.request_id]
        if outputs:
            self._emit(outputs)

    def _end_all(self, reason: str) -> None:
        """The loop is over: every request that is left gets an error, and nothing new is taken."""
        with self._changed:
            self._down = reason
            left, self._live = list(self._live.values()), {}
        if not left:
            return
        try:
            self._emit([self._final_output(state, FinishReason.ERROR, reason) for state in left])
        except Exception:
            logger.exception("the outputs of %d requests could not be delivered", len(left))
