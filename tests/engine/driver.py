"""Driver: runs a scheduler over a checking mock backend step by step, without threads, as EngineCore does with one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from backends.mock import MockBackend, mock_tokens
from engine.backend import Capabilities, PendingStep
from engine.config import EngineConfig
from engine.kv_exports import KVExports
from engine.kv_imports import KVExchange
from engine.limits import Limits, usable
from engine.metrics import EngineMetrics
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from engine.running import RequestState, Status
from engine.scheduler import ScheduledStep, Scheduler
from tests.engine.fake_connector import FakeConnector

EOS = 2


class Driver:
    def __init__(
        self,
        *,
        overlap: bool = True,
        eos_every: int = 0,
        capabilities: Capabilities | None = None,
        connector: FakeConnector | None = None,
        **options: Any,
    ) -> None:
        options = {"block_size": 8, "max_num_batched_tokens": 64, "max_decode_seqs": 8, "max_model_len": 512, **options}
        self.config = EngineConfig.from_args({"backend": "mock", **options})
        self.eos_every = eos_every
        self.backend = MockBackend(
            self.config, check=True, eos_token_id=EOS, eos_every=eos_every, capabilities=capabilities
        )
        info = self.backend.load()
        limits = Limits.of(self.config, info)
        self.info = usable(info, limits)
        self.metrics = EngineMetrics()
        self.connector = connector
        self.exports: KVExports | None = None
        exchange = None
        if connector is not None:
            size = self.info.block_size
            self.exports = KVExports(connector, self.backend, block_size=size, metrics=self.metrics)
            exchange = KVExchange(connector=connector, write_blocks=self.backend.write_blocks)
        self.scheduler = Scheduler(limits, self.info, self.metrics, exchange=exchange)
        self.overlap = overlap
        self.in_flight: tuple[ScheduledStep, PendingStep] | None = None
        self.states: dict[str, RequestState] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.batches: list[ScheduledStep] = []

    def submit(self, prompt: list[int], *, name: str = "", **fields: Any) -> str:
        """Queues a request; keyword arguments are those of EngineRequest and SamplingParams."""
        name = name or f"r{len(self.states)}"
        own = {key: fields.pop(key) for key in ("output_token_ids", "cache_salt", "export_from") if key in fields}
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **fields})
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **own)
        state = RequestState(request, eos_token_ids=(EOS,), max_model_len=self.info.max_model_len)
        self.states[name] = state
        self.outputs[name] = []
        self.scheduler.add(state)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish(self.states[name])

    def step(self) -> bool:
        """One round of the engine's loop; False when there was nothing to do."""
        self._keep(self.scheduler.take_kv_events())
        scheduled = self.scheduler.schedule()
        if self.exports is not None:
            self.exports.before_step(self.scheduler.take_evicted())
        pending = None
        if scheduled is not None:
            self.batches.append(scheduled)
            pending = (scheduled, self.backend.dispatch(scheduled.batch))
            if self.exports is not None:
                self.exports.after_dispatch(scheduled.chunks)
        if self.overlap:
            ready, self.in_flight = self.in_flight, pending
        else:
            ready = pending
        if ready is not None:
            self._keep(self.scheduler.collect(ready[0], ready[1].result()))
            if self.exports is not None:
                self.exports.after_collect(self.scheduler.take_computed())
        return ready is not None or pending is not None

    def _keep(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)

    def run(self, limit: int = 10_000) -> None:
        """Steps until every request has ended."""
        for _ in range(limit):
            if not self.step():
                if self.scheduler.awaits_kv and self.connector is not None:
                    self.connector.release_all()
                    continue
                assert not self.scheduler.has_work, "work left, and nothing scheduled"
                return
        raise AssertionError("the requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def reason(self, name: str) -> FinishReason | None:
        return self.outputs[name][-1].finish_reason if self.outputs[name] else None

    def expected(self, name: str) -> list[int]:
        """What the request yields when it runs alone."""
        state = self.states[name]
        sampling, known = state.request.sampling, len(state.request.output_token_ids)
        tokens = mock_tokens(
            state.request.prompt_token_ids,
            state.max_len - state.prompt_len,
            seed=sampling.seed if sampling.temperature else 0,
            eos_token_id=EOS,
            eos_every=self.eos_every,
            min_tokens=sampling.min_tokens,
        )
        ends = [] if sampling.ignore_eos else [i for i, t in enumerate(tokens) if t == EOS and i >= sampling.min_tokens]
        return tokens[known : ends[0] + 1 if ends else None]

    def assert_consistent(self) -> None:
        """Every block is free or owned by as many requests as the pool thinks; unregistered ones by exactly one."""
        pool = self.scheduler._pool
        running = [state for state in self.states.values() if state.slot >= 0]
        importing = [state for state in self.states.values() if state.status is Status.IMPORTING]
        owners = Counter(block for state in (*running, *importing) for block in state.block_ids)
        assert all(pool._owners[block] == owners[block] for block in range(pool.num_blocks)), "reference counts"
        assert set(pool._free) == {block for block in range(pool.num_blocks) if not owners[block]}, "free blocks"
        for block, known_as in enumerate(pool._hash_of):
            assert known_as is None or pool._by_hash[known_as] == block, "hash index"
            assert known_as is not None or owners[block] <= 1, "a writable block is shared"
        assert len(pool._by_hash) == sum(known_as is not None for known_as in pool._hash_of)
        assert len({state.slot for state in running}) == len(running) == self.scheduler.num_running
        for state in self.states.values():
            assert state.slot >= 0 or state in importing or not state.block_ids, "blocks without a place in the batch"
            assert (state.slot >= 0) == (state.status not in (Status.WAITING, Status.IMPORTING, Status.FINISHED))
        assert len(importing) == len(self.scheduler._imports)

    def assert_empty(self) -> None:
        self.assert_consistent()
        assert self.scheduler._pool.num_free == self.info.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.connector is None or not self.connector.pending, "a fetch is still open"
