"""Collector: turns a step's result into outputs, and ends the requests that are complete.

Rows of requests that ended while the step was in flight are ignored. A request that was preempted meanwhile keeps its
token: it was computed before the blocks were given away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from engine.batch import LogprobArrays, StepBatch, StepResult
from engine.kv_cache import BlockPool, HashedBlock
from engine.metrics import EngineMetrics
from engine.request import FinishReason, RequestOutput, TokenLogprobs
from engine.running import RequestState, Status
from engine.slot_table import SlotTable


class Collector:
    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        caching: bool,
        metrics: EngineMetrics,
        finish: Callable[[RequestState], None],
        clock: Callable[[], float],
        *,
        keeps_computed: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`keeps_computed`: which prompt blocks, by their hash, to list for `take_computed` as they become findable."""
        self._table = table
        self._pool = pool
        self._block_size = table.block_size
        self._caching = caching
        self._metrics = metrics
        self._finish = finish
        self._clock = clock
        self._keeps_computed = keeps_computed
        self._computed: list[HashedBlock] = []

    def collect(self, batch: StepBatch, rows: tuple[RequestState, ...], result: StepResult) -> list[RequestOutput]:
        if self._caching:
            self._register_full_blocks(batch, rows)
        if result.prompt_logprobs is not None:
            _store_prompt_logprobs(batch, rows, result.prompt_logprobs)
        self._learn_tokens(batch, rows, result)
        outputs = self._outputs(batch, rows, result)
        self._metrics.generation_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def take_token(self, state: RequestState, token: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        """The output of a token that was sampled elsewhere, along with the request's KV."""
        now = self._clock()
        reason = state.append(token)
        if state.last_token_time:
            self._metrics.inter_token_latency_seconds.observe(now - state.last_token_time)
        self._metrics.generation_tokens += 1
        wanted = None if state.request.sampling.logprobs is None or logprobs is None else (logprobs,)
        return self._output(state, token, reason, wanted, now)

    def take_computed(self) -> list[HashedBlock]:
        """Prompt blocks that have become findable since the last call."""
        computed, self._computed = self._computed, []
        return computed

    def _outputs(self, batch: StepBatch, rows: tuple[RequestState, ...], result: StepResult) -> list[RequestOutput]:
        now = self._clock()
        outputs = []
        previous: list[float] = []  # when each row's token before this one came
        tokens, samples = result.token_ids.tolist(), batch.samples.tolist()
        for row, state in enumerate(rows):
            if state.status is Status.FINISHED:
                continue
            if not samples[row]:
                if state.request.sampling.max_tokens == 0 and batch.kv_lens[row] == state.num_tokens:
                    outputs.append(self._output(state, None, FinishReason.LENGTH, None, now))
                continue
            token = tokens[row]
            reason = state.append(token)
            if state.last_token_time:
                previous.append(state.last_token_time)
            if reason is None and state.last_token_time and result.logprobs is None:  # nearly all rows; keep it short
                state.last_token_time = now
                output = RequestOutput(
                    request_id=state.request_id, token_ids=(token,), num_cached_tokens=state.num_cached_tokens
                )
            else:
                output = self._output(state, token, reason, _logprobs_of(state, token, row, result.logprobs), now)
            outputs.append(output)
        for then, count in Counter(previous).items():
            self._metrics.inter_token_latency_seconds.observe(now - then, count)
        return outputs

    def _register_full_blocks(self, batch: StepBatch, rows: tuple[RequestState, ...]) -> None:
        """Makes blocks that this step completed findable. All their tokens are known: they were the step's input."""
        num_full = batch.kv_lens // self._block_size
        for row in np.flatnonzero(num_full > (batch.kv_lens - batch.query_lens) // self._block_size).tolist():
            state, count = rows[row], int(num_full[row])
            if state.slot < 0:  # ended or preempted: the blocks are no longer its own
                continue
            hashes = state.block_hashes(count, self._block_size)
            for index in range(state.num_registered_blocks, count):
                block = state.block_ids[index]
                is_new = self._pool.register(block, hashes[index])
                is_prompt = (index + 1) * self._block_size <= state.prompt_len
                if is_new and is_prompt and self._keeps_computed is not None and self._keeps_computed(hashes[index]):
                    self._computed.append((hashes[index], block))
            state.num_registered_blocks = count

    def _learn_tokens(self, batch: StepBatch, rows: tuple[RequestState, ...], result: StepResult) -> None:
        """Enters sampled tokens into the slot table, except for rows whose slot may be somebody else's by now."""
        current = batch.samples
        if any(state.slot < 0 for state in rows):
            current = current & np.array([state.slot >= 0 for state in rows])
        slots = batch.slots[current]
        self._table.num_known[slots] += 1
        self._table.last_token[slots] = result.token_ids[current]

    def _output(
        self,
        state: RequestState,
        token: int | None,
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
        now: float,
    ) -> RequestOutput:
        """An output that may be a request's first or last."""
        prompt_logprobs = None
        if not state.last_token_time:
            prompt_logprobs = self._prompt_done(state, now)
        state.last_token_time = now
        if reason is not None:
            self._finish(state)
            self._metrics.request_ended(state.record(), reason, now)
        return RequestOutput(
            request_id=state.request_id,
            token_ids=() if token is None else (token,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
            num_cached_tokens=state.num_cached_tokens,
        )

    def _prompt_done(self, state: RequestState, now: float) -> tuple[TokenLogprobs | None, ...] | None:
        """Notes that a prompt is computed; gives its logprobs, if asked for."""
        state.first_token_time = now
        self._metrics.prompt_tokens += state.prompt_len
        if not state.request.output_token_ids:
            self._metrics.time_to_first_token_seconds.observe(now - state.arrival_time)
        logprobs, state.prompt_logprobs = state.prompt_logprobs, None
        return None if logprobs is None else tuple(logprobs)


def _store_prompt_logprobs(batch: StepBatch, rows: tuple[RequestState, ...], arrays: LogprobArrays) -> None:
    """Keeps the logprob of each prompt token that follows one of this step's query tokens."""
    offsets = np.cumsum(batch.query_lens) - batch.query_lens
    for row in np.flatnonzero(batch.prompt_logprobs).tolist():
        state, offset = rows[row], int(offsets[row])
        top = state.request.sampling.prompt_logprobs
        if state.prompt_logprobs is None or top is None:
            continue
        start = int(batch.kv_lens[row] - batch.query_lens[row])
        for position in range(start + 1, min(int(batch.kv_lens[row]) + 1, state.prompt_len)):
            index = offset + position - 1 - start
            state.prompt_logprobs[position] = _token_logprobs(arrays, index, state.token_ids[position], top)


def _logprobs_of(
    state: RequestState, token: int, row: int, arrays: LogprobArrays | None
) -> tuple[TokenLogprobs, ...] | None:
    top = state.request.sampling.logprobs
    return None if top is None or arrays is None else (_token_logprobs(arrays, row, token, top),)


def _token_logprobs(arrays: LogprobArrays, index: int, token_id: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(arrays.chosen[index]),
        top=tuple(zip(arrays.top_ids[index, :top].tolist(), arrays.top_logprobs[index, :top].tolist(), strict=True)),
    )
