"""What the prefix store gives and costs on this machine, with a real model and a real Ray.

    python -m bench.prefix_store [--model smollm2] [--tokens 2000] [--rounds 5]

First token: a prompt that another engine has computed, found in the store, against the same length computed. Writes:
the time between tokens of running streams while prompts are computed, with the store and without. Variants take turns,
so that a busy machine slows all of them. Prints Markdown tables of medians.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from backends import create_backend
from cluster.ray_environment import set_environment
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput, SamplingParams

TIMEOUT_S = 120.0
STREAMS, STREAM_TOKENS, PROMPTS = 4, 100, 2


@dataclass(kw_only=True)
class Stream:
    submitted: float
    at: list[float] = field(default_factory=list)  # of each output
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.at[0] - self.submitted)

    @property
    def gaps_ms(self) -> list[float]:
        return [1000 * (after - before) for before, after in zip(self.at, self.at[1:], strict=False)]


class Engine:
    """One replica's engine in this process."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        backend = create_backend(config)
        self._streams: dict[str, Stream] = {}
        self.connector = None
        if config.kv_store is not None:
            from cluster.prefix_store.connector import PrefixStoreConnector
            from cluster.prefix_store.ray_client import RayStoreClient

            self.connector = PrefixStoreConnector(config, backend, RayStoreClient("bench", name, None))
        self._core = EngineCore(config, backend, self._emit, self.connector)
        self._core.load()
        self._core.start()
        self.block_bytes = config.block_size * backend.kv_format().bytes_per_token

    def _emit(self, outputs: list[RequestOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            stream = self._streams[output.request_id]
            stream.at.append(now)
            stream.tokens += output.token_ids
            stream.cached = output.num_cached_tokens
            if output.finish_reason is not None:
                stream.ended.set()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        name = f"r{len(self._streams)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        stream = self._streams[name] = Stream(submitted=time.perf_counter())
        self._core.submit(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        return stream

    def run(self, prompt: Sequence[int], max_tokens: int = 8) -> Stream:
        stream = self.submit(prompt, max_tokens)
        assert stream.ended.wait(TIMEOUT_S), "no answer"
        return stream

    def metric(self, name: str) -> float:
        assert self.connector is not None
        return self.connector.metrics().values[name]

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.metric(name) < value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def stop(self) -> None:
        self._core.stop()


def prompts(length: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 30000) for _ in range(length)] for _ in range(count)]


def first_tokens(warm: Engine, cold: Engine, length: int, rounds: int) -> None:
    known, unknown = prompts(length, rounds + 1, 1), prompts(length, rounds + 1, 2)
    per_prompt = length // 32 * warm.block_bytes
    texts = []
    for number, prompt in enumerate(known, start=1):
        texts.append(warm.run(prompt).tokens)
        warm.wait_for("kv_store_written_bytes", number * per_prompt)
    time.sleep(1.0)  # followers hear of it
    hits, computed = [], []
    for number in range(rounds + 1):
        hit, miss = cold.run(known[number]), cold.run(unknown[number])
        assert hit.cached == length // 32 * 32, hit.cached
        assert miss.cached == 0
        hits.append(hit)
        computed.append(miss)
    same = sum(hit.tokens == text for hit, text in zip(hits, texts, strict=True))
    print(f"| prompt of {length} tokens | first token, ms |\n| --- | --- |")
    print(f"| computed | {median(s.ttft_ms for s in computed[1:]):.0f} |")
    print(f"| found in the store ({per_prompt / 2**20:.0f} MiB) | {median(s.ttft_ms for s in hits[1:]):.0f} |\n")
    print(f"{same} of {len(hits)} greedy answers (8 tokens) are those of the engine that computed the prompt.")
    reads, seconds = cold.metric("kv_store_reads"), cold.metric("kv_store_read_seconds")
    written, write_s = warm.metric("kv_store_written_bytes"), warm.metric("kv_store_write_seconds")
    print(f"A read takes {1000 * seconds / reads:.0f} ms; writes run at {written / write_s / 1e6:.0f} MB/s.\n")


def between_tokens(engines: dict[str, Engine], length: int, rounds: int) -> None:
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for variant, (name, engine) in enumerate(engines.items()):
            streams = [engine.submit([number, 7, i + 100], STREAM_TOKENS) for i in range(STREAMS)]
            for prompt in prompts(length, PROMPTS, 1000 + len(engines) * number + variant):
                time.sleep(0.3)
                engine.run(prompt, 1)
            for stream in streams:
                assert stream.ended.wait(TIMEOUT_S)
                gaps[name] += stream.gaps_ms[1:]
            time.sleep(1.0)
    print(f"{STREAMS} streams while {PROMPTS} prompts of {length} tokens come, one after another:\n")
    print("| time between tokens, ms | p50 | p90 | p99 | mean |\n| --- | --- | --- | --- | --- |")
    for name, values in gaps.items():
        cuts = quantiles(values, n=100)
        mean = sum(values) / len(values)
        print(f"| {name} | {cuts[49]:.1f} | {cuts[89]:.1f} | {cuts[98]:.1f} | {mean:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options = {"model": args.model, "dtype": args.dtype, "backend": "cpu", "max_model_len": args.tokens + 400}
    options |= {"num_blocks": 1200, "max_decode_seqs": 8}
    plain = EngineConfig.from_args(options)
    stored = EngineConfig.from_args({**options, "kv_store": "object_store"})
    with tempfile.TemporaryDirectory(prefix="sliceserve-bench-") as folder:
        set_environment(Path(folder), haproxy=False)
        from cluster.local_ray import LocalRay

        ray = LocalRay(Path(folder))
        engines = {"warm": Engine(stored, "warm"), "cold": Engine(stored, "cold"), "plain": Engine(plain, "plain")}
        try:
            for name in ("warm", "cold"):
                engines[name].wait_for("kv_store_connected", 1)
            first_tokens(engines["warm"], engines["cold"], args.tokens, args.rounds)
            pair = {"without the store": engines["plain"], "with the store": engines["warm"]}
            between_tokens(pair, args.tokens // 2, args.rounds)
        finally:
            for engine in engines.values():
                engine.stop()
            ray.stop()


if __name__ == "__main__":
    main()
