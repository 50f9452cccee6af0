"""What a gang's broadcast adds to each step, against the same backend in the engine's own process.

    python -m bench.gang_overhead [--hosts 2,4] [--rows 1,64,256]

The backend is the mock one, whose steps take a set time, so that all else is overhead. Hosts are real Ray actors on
this machine. Three ways take turns, so that a busy machine slows all: in-process, the gang's lines, and Ray actor calls
to the same number of actors. Per step, medians: `alone` waits for each step before it sends the next one; `overlapped`
is the engine's way, in which a step is sent while the one before it runs (`--step-ms`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from backends.mock import MockBackend
from cluster.ray_environment import set_environment
from engine.backend import Backend, PendingStep
from engine.batch import SamplingArrays, StepBatch, StepResult
from engine.config import EngineConfig

ROUNDS, STEPS = 5, 40
CONTEXT = 1000  # tokens of each row


def decode_batch(rows: int, block_size: int) -> StepBatch:
    """One token of each of so many requests, of CONTEXT tokens each."""
    blocks = -(-CONTEXT // block_size)
    ints, floats = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    sampling = SamplingArrays(
        temperature=floats,
        top_k=ints,
        top_p=floats + 1,
        min_p=floats,
        repetition_penalty=floats + 1,
        presence_penalty=floats,
        frequency_penalty=floats,
        seed=np.zeros((rows, 2), np.uint32),
        prompt_len=ints + 10,
        min_len=ints,
        rewrites_logits=np.zeros(rows, np.bool_),
        num_logprobs=ints - 1,
    )
    return StepBatch(
        step=0,
        token_ids=ints + 5,
        positions=ints + (CONTEXT - 1),
        query_lens=ints + 1,
        kv_lens=ints + CONTEXT,
        slots=np.arange(rows, dtype=np.int32),
        block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        samples=np.ones(rows, np.bool_),
        sampling=sampling,
        prompt_logprobs=np.zeros(rows, np.bool_),
        target_ids=ints,
    )


def alone_ms(dispatch: Callable[[StepBatch], PendingStep], batch: StepBatch) -> float:
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        dispatch(batch).result()
        times.append(time.perf_counter() - started)
    return 1000 * median(times)


def overlapped_ms(dispatch: Callable[[StepBatch], PendingStep], batch: StepBatch) -> float:
    times, pending = [], dispatch(batch)
    last = time.perf_counter()
    for _ in range(STEPS):
        following = dispatch(batch)
        pending.result()
        now = time.perf_counter()
        times.append(now - last)
        pending, last = following, now
    pending.result()
    return 1000 * median(times)


class Actor:
    """A host that is called through Ray: what a gang without lines would be."""

    def __init__(self, config: EngineConfig) -> None:
        self._backend = MockBackend(config)
        self._backend.load()

    def step(self, data: StepBatch) -> StepResult:
        return self._backend.dispatch(data).result()


class CalledStep(PendingStep):
    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def result(self) -> StepResult:
        import ray

        first: StepResult = ray.get(self._results, timeout=60)[0]
        return first


def called(actors: list[Any]) -> Callable[[StepBatch], PendingStep]:
    def dispatch(batch: StepBatch) -> PendingStep:
        return CalledStep([actor.step.remote(batch) for actor in actors])

    return dispatch


def measure(config: EngineConfig, rows: list[int]) -> None:
    import ray

    from cluster.gang.backend import GangBackend
    from cluster.gang.ray_launcher import RayLauncher

    own = MockBackend(config)
    own.load()
    gang: Backend = GangBackend(config, RayLauncher(config, name="sliceserve:bench:worker", log_level="WARNING"))
    gang.load()
    gang.warmup()
    actors = [ray.remote(Actor).options(num_cpus=0.1).remote(config) for _ in range(config.num_hosts)]
    ways = {"in-process": own.dispatch, "lines": gang.dispatch, "actor calls": called(actors)}
    for count in rows:
        batch = decode_batch(count, config.block_size)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, dispatch in ways.items():
                found[name].append((alone_ms(dispatch, batch), overlapped_ms(dispatch, batch)))
        medians = {name: tuple(median(each) for each in zip(*pairs, strict=True)) for name, pairs in found.items()}
        base = medians["in-process"]
        cells = " | ".join(
            f"{alone - base[0]:+.2f} / {overlapped - base[1]:+.2f}"
            for name, (alone, overlapped) in medians.items()
            if name != "in-process"
        )
        print(f"| {config.num_hosts} | {count} | {base[0]:.2f} / {base[1]:.2f} | {cells} |", flush=True)
    gang.close()
    for actor in actors:
        ray.kill(actor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--step-ms", type=float, default=5.0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sliceserve-bench-"))
    set_environment(folder, haproxy=False)
    from cluster.local_ray import LocalRay

    ray = LocalRay(folder)
    try:
        print("| hosts | rows | in-process, ms (alone / overlapped) | lines add, ms | actor calls add, ms |")
        print("| --- | --- | --- | --- | --- |")
        for hosts in map(int, arguments.hosts.split(",")):
            options = {"backend": "mock", "num_hosts": hosts, "tensor_parallel_size": hosts}
            config = EngineConfig.from_args({**options, "mock_step_ms": arguments.step_ms, "max_model_len": 2048})
            measure(config, list(map(int, arguments.rows.split(","))))
    finally:
        ray.stop()


if __name__ == "__main__":
    main()
