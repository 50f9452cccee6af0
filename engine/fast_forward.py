"""FastForward: many decode steps of the same requests at once, for simulations, which have no device to wait for.

While the same requests decode, and none comes or goes, each step does what the one before it did: a token more for each
of them, and now and then a block. What is left of `schedule` and `collect` then takes a few operations for all steps
together. The result is the same to the last block, which a test compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from engine.kv_cache import BlockPool
from engine.metrics import EngineMetrics
from engine.request import RequestOutput
from engine.running import RequestState
from engine.slot_table import DecodeRows, SlotTable

_REGISTER, _ALLOCATE = 0, 1


class FastForward:
    def __init__(self, table: SlotTable, pool: BlockPool, metrics: EngineMetrics, *, caching: bool) -> None:
        self._table = table
        self._pool = pool
        self._metrics = metrics
        self._caching = caching

    def most_steps(self, decode: DecodeRows, token: int) -> int:
        """How many more steps can be planned before a request ends, or blocks might run out, if all sample `token`."""
        table, slots = self._table, decode.slots
        if any(token in state.stop_ids for state in decode.requests):
            return 0
        steps = int((table.last_kv_len[slots] - table.kv_len[slots]).min())
        blocks_each = self._pool.num_free // len(slots)
        return max(0, min(steps, (blocks_each - 1) * table.block_size))

    def take(self, decode: DecodeRows, token: int, times: Sequence[float]) -> list[RequestOutput]:
        """One step for each of `times`, at which the oldest step is read and then another one planned."""
        table, slots, count = self._table, decode.slots, len(times)
        starts = zip(table.kv_len[slots].tolist(), table.num_known[slots].tolist(), strict=True)
        for state in decode.requests:
            state.token_ids.extend([token] * count)
        events = sorted(event for row, start in enumerate(starts) for event in self._events(row, *start, count))
        for _, kind, row, length in events:
            state = decode.requests[row]
            if kind == _ALLOCATE:
                self._allocate(state, length)
            else:
                self._register(state, length // table.block_size)
        table.kv_len[slots] += count
        table.num_known[slots] += count
        table.last_token[slots] = token
        self._measure(decode.requests, times)
        tokens = (token,) * count
        return [
            RequestOutput(request_id=state.request_id, token_ids=tokens, num_cached_tokens=state.num_cached_tokens)
            for state in decode.requests
        ]

    def _events(self, row: int, kv_len: int, num_known: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """What a row does besides counting: (step, kind, row, tokens)."""
        size = self._table.block_size
        for step in range(-kv_len % size, count, size):
            yield step, _ALLOCATE, row, kv_len + step
        if self._caching:
            for step in range(-num_known % size, count, size):
                yield step, _REGISTER, row, num_known + step

    def _allocate(self, state: RequestState, kv_len: int) -> None:
        if len(state.block_ids) * self._table.block_size <= kv_len:
            state.block_ids += self._pool.allocate(1)
        self._table.extend_blocks(state, kv_len, kv_len + 1)

    def _register(self, state: RequestState, num_full: int) -> None:
        hashes = state.block_hashes(num_full, self._table.block_size)
        for index in range(state.num_registered_blocks, num_full):
            self._pool.register(state.block_ids[index], hashes[index])
        state.num_registered_blocks = num_full

    def _measure(self, requests: Sequence[RequestState], times: Sequence[float]) -> None:
        metrics, num_rows = self._metrics, len(requests)
        gaps = metrics.inter_token_latency_seconds
        for then, count in Counter(state.last_token_time for state in requests).items():
            gaps.observe(times[0] - then, count)
        for before, now in pairwise(times):
            gaps.observe(now - before, num_rows)
        metrics.iteration_tokens_total.observe(num_rows, len(times))
        metrics.generation_tokens += num_rows * len(times)
        for state in requests:
            state.last_token_time = times[-1]
