"""Scheduler: decides each step which tokens of which requests are computed, and takes back the results.

One number drives everything: a request has `kv_len` computed tokens, and each step brings it closer to the number of
its known tokens. New prompts, chunks of long ones, prefix hits and requests resumed after a preemption are the same
case. Once all known tokens are computed a request decodes: one token per step, taken from the device when the host
has not read it yet.

Steps are scheduled while an earlier one is still running, which is safe because of two facts. (1) Steps run on the
device in the order they are dispatched. A request that ends or is preempted may still have a row in flight; its blocks
and slot can be given away at once, because that row's writes come before everything that a later step does with them.
(2) A block becomes findable by its content only when the step that completed it has been read, and nobody writes to
a block after it is complete. So a stale row can't touch a block that anybody else reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine.backend import BackendInfo
from engine.batch import SlotState, StepBatch, StepResult
from engine.batch_builder import BatchBuilder, Chunk
from engine.collector import Collector
from engine.fast_forward import FastForward
from engine.kv_cache import BlockPool, HashedBlock
from engine.kv_imports import KVExchange, KVImports
from engine.limits import Limits
from engine.metrics import EngineMetrics
from engine.news import CacheJournal, EngineLoad
from engine.request import RequestOutput
from engine.running import RequestState, Status
from engine.slot_table import NO_ROWS, DecodeRows, SlotTable
from engine.waiting_room import WaitingRoom


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A batch and the request of each of its rows."""

    batch: StepBatch
    rows: tuple[RequestState, ...]
    chunks: tuple[Chunk, ...]  # of the last rows

    def later(self, num_steps: int) -> ScheduledStep:
        """So many decode steps later, for `collect` alone: input tokens and block tables stay as they were."""
        batch = self.batch
        batch = replace(batch, step=batch.step + num_steps, kv_lens=batch.kv_lens + np.int32(num_steps))
        return replace(self, batch=batch)


class Scheduler:
    """Not thread-safe: one thread schedules and collects."""

    def __init__(
        self,
        limits: Limits,
        info: BackendInfo,
        metrics: EngineMetrics,
        *,
        clock: Callable[[], float] = time.time,
        exchange: KVExchange | None = None,
        journal: CacheJournal | None = None,
    ) -> None:
        """`clock` gives seconds since the epoch; a simulation has its own. `journal` follows the prefix cache."""
        self._limits = limits
        self._block_size = info.block_size
        self._metrics = metrics
        self._clock = clock
        self._pool = BlockPool(info.num_blocks, exchange.connector.keeps if exchange else None, journal)
        max_blocks = min(-(-info.max_model_len // info.block_size), info.num_blocks)
        self._table = SlotTable(num_slots=limits.running, max_blocks=max_blocks, block_size=info.block_size)
        self._builder = BatchBuilder(self._table, block_size=info.block_size)
        self._running: dict[str, RequestState] = {}  # in the order of admission
        self._prefilling: dict[str, RequestState] = {}  # in the order of admission
        self._decode = NO_ROWS
        self._joining: list[RequestState] = []  # decode from the next step on
        self._decode_changed = False
        self._free_slots = list(range(limits.running - 1, -1, -1))
        self._new_slot_states: list[SlotState] = []
        self._step = 0
        self._last_collected = -1
        self._prefilled_last = False
        self._collector = Collector(
            self._table,
            self._pool,
            limits.caching,
            metrics,
            self.finish,
            clock,
            keeps_computed=exchange.connector.keeps if exchange and exchange.connector.wants_computed else None,
        )
        self._imports = KVImports(
            exchange,
            self._pool,
            block_size=info.block_size,
            caching=limits.caching,
            metrics=metrics,
            take_token=self._collector.take_token,
        )
        self._room = WaitingRoom(self._pool, self._imports, limits, metrics, clock, block_size=info.block_size)
        self._exchanges_kv = exchange is not None
        self._forward = FastForward(self._table, self._pool, metrics, caching=limits.caching)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._room.num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._room.num_waiting or self._room.num_importing)

    @property
    def awaits_kv(self) -> bool:
        """Whether KV is on its way here, so that having nothing to compute may be right."""
        return self._imports.is_fetching

    @property
    def kv_usage(self) -> float:
        return self._pool.usage

    @property
    def load(self) -> EngineLoad:
        remaining = sum([self.num_left(state) for state in self._prefilling.values()])
        return EngineLoad(
            running=len(self._running),
            waiting=self._room.num_waiting + self._room.num_importing,
            queued_tokens=remaining + self._room.waiting_tokens,
            free_blocks=self._pool.num_free,
        )

    def num_left(self, state: RequestState) -> int:
        """Known tokens of a request whose KV is not computed. From another thread, it is as of about now."""
        slot = state.slot
        return state.num_tokens - (int(self._table.kv_len[slot]) if slot >= 0 else 0)

    def collect(self, step: ScheduledStep, result: StepResult) -> list[RequestOutput]:
        """Takes back the result of the oldest step that was not collected yet."""
        self._last_collected = step.batch.step
        return self._collector.collect(step.batch, step.rows, result)

    def take_kv_events(self) -> list[RequestOutput]:
        """Takes in KV that has come from elsewhere, and first tokens that came with it."""
        return self._imports.take_events()

    def take_evicted(self) -> list[HashedBlock]:
        """Blocks that the step just planned overwrites and the connector wants to keep."""
        return self._pool.take_evicted()

    def take_computed(self) -> list[HashedBlock]:
        """Prompt blocks that the step just collected has completed, if the connector wants them."""
        return self._collector.take_computed()

    # -- many steps at once, in simulations

    def steady_steps(self, in_flight: Sequence[ScheduledStep], token: int) -> int:
        """How many steps `fast_forward` may take from here, all of which sample `token`; mostly 0.

        Args:
            in_flight: the steps that are not collected yet.
        """
        waits = self._exchanges_kv or self._room.num_waiting or self._prefilling
        if waits or self._decode_changed or not self._decode.requests:
            return 0
        if any(step.chunks or step.rows != self._decode.requests for step in in_flight):
            return 0
        return self._forward.most_steps(self._decode, token)

    def fast_forward(
        self, in_flight: Sequence[ScheduledStep], token: int, times: Sequence[float]
    ) -> tuple[list[ScheduledStep], list[RequestOutput]]:
        """At each of `times` collects the oldest step and plans another one.

        Returns:
            The steps that are in flight then, and what each request got, as one output.
        """
        outputs = self._forward.take(self._decode, token, times)
        self._step += len(times)
        self._last_collected += len(times)
        self._table.last_step[self._decode.slots] = self._step - 1
        return [step.later(len(times)) for step in in_flight], outputs

    # -- requests come and go

    def add(self, state: RequestState) -> None:
        self._room.add(state)

    def finish(self, state: RequestState) -> None:
        """Forgets a request, whatever it is doing, and frees everything it has. Its rows in flight are ignored."""
        self._vacate(state)
        state.status = Status.FINISHED

    def _preempt(self, state: RequestState) -> None:
        """Takes everything from a request; it is computed again later, before anybody who waits."""
        self._vacate(state)
        self._room.add(state, first=True)
        self._metrics.num_preemptions += 1

    def _vacate(self, state: RequestState) -> None:
        if state.slot < 0:
            self._room.leave(state)
            return
        del self._running[state.request_id]
        self._prefilling.pop(state.request_id, None)
        self._decode_changed = True
        state.last_step = int(self._table.last_step[state.slot])
        self._pool.release(state.block_ids)
        state.block_ids = []
        self._free_slots.append(state.slot)
        state.slot = -1

    # -- a step is planned

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when no request has anything to compute that is not already in flight."""
        self._room.begin_imports(len(self._running), self._last_collected)
        if self._limits.mixed:
            decode = self._plan_decode()
            chunks = self._plan_prefill(len(decode.requests))
        else:
            decode, chunks = self._plan_unmixed()
        if not decode.requests and not chunks:
            return None
        slot_states, self._new_slot_states = tuple(self._new_slot_states), []
        batch = self._builder.build(self._step, decode, chunks, slot_states)
        self._step += 1
        for chunk in chunks:
            self._advance(chunk)
        self._metrics.iteration_tokens_total.observe(batch.num_tokens)
        rows = decode.requests + tuple(chunk.state for chunk in chunks)
        return ScheduledStep(batch=batch, rows=rows, chunks=tuple(chunks))

    def _plan_unmixed(self) -> tuple[DecodeRows, list[Chunk]]:
        """Prefill first, but never twice in a row while somebody decodes."""
        if self._prefilled_last:
            self._prefilled_last = False
            decode = self._plan_decode()
            if decode.requests:
                return decode, []
        chunks = self._plan_prefill(0)
        self._prefilled_last = bool(chunks)
        return (NO_ROWS if chunks else self._plan_decode()), chunks

    def _plan_decode(self) -> DecodeRows:
        """Rows that decode, each with a block for its next token; preempts when blocks run out."""
        decode = self._current_decode()
        if not decode.requests:
            return decode
        kv_lens = self._table.kv_len[decode.slots]
        done = kv_lens >= self._table.last_kv_len[decode.slots]
        if done.any():
            for row in np.flatnonzero(done).tolist():
                decode.requests[row].status = Status.DRAINING
            self._decode_changed = True
        starts_block = (kv_lens % self._block_size == 0) & ~done
        for row in np.flatnonzero(starts_block).tolist():
            self._give_block(decode.requests[row], int(kv_lens[row]))
        return self._current_decode()

    def _current_decode(self) -> DecodeRows:
        if self._decode_changed:
            candidates = (*self._decode.requests, *self._joining)
            requests = tuple(state for state in candidates if state.status is Status.DECODING)
            self._decode = DecodeRows(requests, np.array([state.slot for state in requests], np.int32))
            self._joining = []
            self._decode_changed = False
        return self._decode

    def _give_block(self, state: RequestState, kv_len: int) -> None:
        """Gives a decoding request the block of its next token, if need be by preempting another one."""
        while state.status is Status.DECODING:  # it may be the latest itself
            owned = len(state.block_ids) * self._block_size > kv_len  # it got one more than its known tokens fill
            if owned or self._pool.num_free:
                state.block_ids += self._pool.allocate(0 if owned else 1)
                self._table.extend_blocks(state, kv_len, kv_len + 1)
                return
            running = (s for s in reversed(self._running.values()) if s.status is not Status.DRAINING)
            self._preempt(self._imports.latest or next(running))

    def _plan_prefill(self, num_decode: int) -> list[Chunk]:
        """Chunks of requests that prefill, then of requests that can be admitted, in the order of their arrival."""
        budget = self._limits.step_tokens - num_decode
        chunks: list[Chunk] = []
        for state in list(self._prefilling.values()):
            if len(chunks) == self._limits.prefill_rows or not self._fits(self.num_left(state), budget):
                return chunks
            chunks.append(self._chunk(state, budget))
            budget -= chunks[-1].num_tokens
        while len(chunks) < self._limits.prefill_rows and self._free_slots:
            fits = partial(self._fits, budget=budget)
            admitted = self._room.let_in(fits, len(self._running), self._last_collected)
            if admitted is None:
                break
            self._place(*admitted)
            chunks.append(self._chunk(admitted[0], budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def _fits(self, num_tokens: int, budget: int) -> bool:
        """Whether a chunk of num_tokens uncomputed tokens can be taken out of the step's remaining token budget."""
        # What is longer than any step (a resumed request, where chunks are off) has to be split all the same.
        splittable = self._limits.chunked or num_tokens > self._limits.step_tokens
        return budget > 0 and (splittable or num_tokens <= budget)

    def _chunk(self, state: RequestState, budget: int) -> Chunk:
        start = int(self._table.kv_len[state.slot])
        end = min(start + budget, state.num_tokens)
        self._table.extend_blocks(state, start, end)
        return Chunk(
            state=state,
            token_ids=np.array(state.token_ids[start:end], np.int32),
            start=start,
            end=end,
            samples=end == state.num_tokens and state.request.sampling.max_tokens > 0,
        )

    def _advance(self, chunk: Chunk) -> None:
        """A chunk is in a batch: its request goes on to decode if it was the last one."""
        state = chunk.state
        if chunk.end == state.num_tokens:
            del self._prefilling[state.request_id]
            state.status = Status.DECODING
            self._joining.append(state)
            self._decode_changed = True

    def _place(self, state: RequestState, num_computed_tokens: int) -> None:
        self._running[state.request_id] = state
        self._prefilling[state.request_id] = state
        state.status = Status.PREFILLING
        state.slot = self._free_slots.pop()
        slot_state = self._table.assign(state, num_computed_tokens)
        if slot_state is not None:
            self._new_slot_states.append(slot_state)
