"""Decode steps that are taken many at a time: everything is as if they had been taken one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.simulate.engine import SimulatedEngine
from cluster.simulate.models import EngineModel, mock_model
from cluster.simulate.timeline import START, Timeline
from engine.config import EngineConfig
from engine.request import EngineRequest, RequestOutput, SamplingParams


@dataclass(frozen=True)
class LongerWithContext:
    """A device whose steps depend on what they hold."""

    def step_s(self, batch: Any) -> float:
        decoding = batch.query_lens == 1
        own = self.decode_s(int(decoding.sum()), int(batch.kv_lens[decoding].sum()))
        return own if batch.is_decode_only else own + 1e-4 * int(batch.query_lens.sum())

    def decode_s(self, num_rows: int, kv_tokens: int) -> float:
        return 0.01 + 1e-4 * num_rows + 1e-6 * kv_tokens / max(1, num_rows)


def model_of(**options: Any) -> EngineModel:
    small = {
        "block_size": 8,
        "num_blocks": 70,
        "max_num_batched_tokens": 64,
        "max_decode_seqs": 6,
        "max_model_len": 400,
    }
    config = EngineConfig.from_args({"backend": "mock", **small, **options})
    return replace(mock_model(config), clock=LongerWithContext())


def arrivals(rng: random.Random, count: int) -> list[tuple[float, EngineRequest]]:
    shared = [tuple(rng.randbytes(40)) for _ in range(2)]
    now, requests = START, []
    for number in range(count):
        now += rng.expovariate(1.5)
        prompt = rng.choice([*shared, ()]) + tuple(rng.randbytes(rng.choice([1, 8, 50, 100])))
        sampling = SamplingParams(max_tokens=rng.randint(1, 200), temperature=0.0, ignore_eos=True)
        requests.append((now, EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling)))
    return requests


class Run:
    """One engine's life, and everything there is to compare afterwards."""

    def __init__(self, model: EngineModel, requests: list[tuple[float, EngineRequest]], *, coasts: bool) -> None:
        self.timeline = Timeline()
        self.emits = 0
        self.tokens: dict[str, int] = {}
        self.first_and_last: dict[str, list[float]] = {}
        self.seen: list[object] = []
        self.engine = SimulatedEngine(model, self.timeline, self.emitted, journal=True, coasts=coasts)
        for time, request in requests:
            self.timeline.at(time, lambda request=request: self.engine.submit(request))
        for second in range(5, 60, 5):
            self.timeline.at(START + second + 0.1234, self.look)
        self.timeline.run()

    def emitted(self, outputs: list[RequestOutput]) -> None:
        self.emits += 1
        for output in outputs:
            name = output.request_id
            self.tokens[name] = self.tokens.get(name, 0) + len(output.token_ids)
            times = self.first_and_last.setdefault(name, [self.timeline.now, 0.0])
            if output.finish_reason is not None:
                times[1] = self.timeline.now

    def look(self) -> None:
        self.seen.append(self.engine.snapshot())

    def state(self) -> dict[str, object]:
        scheduler, engine = self.engine._scheduler, self.engine
        pool, table = scheduler._pool, scheduler._table
        return {
            "tokens": self.tokens,
            "times": self.first_and_last,
            "seen": self.seen,
            "metrics": engine.snapshot(),
            "news": engine.news(),
            "free blocks": list(pool._free),
            "hashes": pool._hash_of,
            "owners": pool._owners,
            "slots": [array.tolist() for array in (table.kv_len, table.last_kv_len, table.num_known, table.last_step)],
            "block tables": table.block_tables.tolist(),
            "steps": (engine.num_steps, engine.num_tokens, scheduler._step, scheduler._last_collected),
            "device": (engine.busy_s, engine.device_free_at),
        }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", [{}, {"enable_prefix_cache_hbm": False}, {"num_blocks": 52}])
def test_nothing_differs_but_how_often_the_engine_speaks(options: dict[str, Any], seed: int) -> None:
    requests = arrivals(random.Random(seed), 30)
    fast, slow = (Run(model_of(**options), requests, coasts=coasts) for coasts in (True, False))
    assert fast.emits < 0.7 * slow.emits
    mine, other = fast.state(), slow.state()
    for name in other:
        assert mine[name] == other[name], name


def test_a_replica_that_stops_in_between_has_sent_what_it_would_have_sent() -> None:
    requests = arrivals(random.Random(3), 12)
    left = []
    for coasts in (True, False):
        run = Run(model_of(), [], coasts=coasts)
        for _, request in requests:
            run.engine.submit(request)
        stopped: list[EngineRequest] = []
        run.timeline.after(1.7, lambda run=run, stopped=stopped: stopped.extend(run.engine.stop()))
        run.timeline.run()
        left.append([(request.request_id, request.output_token_ids) for request in stopped])
    assert left[0] == left[1]
    assert any(tokens for _, tokens in left[0])
