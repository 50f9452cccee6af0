"""What routing by prefix brings: time to first token and balance of four mock engines, policy by policy, through HTTP.

    python -m bench.routing                                 # all policies
    python -m bench.routing --policies=prefix,round_robin --requests=200 --rate=6

Starts `sliceserve serve --backend=mock --data-parallel-size=4` for each policy, with engines that take their time for
prefill and caches that hold a part of the prefixes each, and sends it two workloads at Poisson times. *shared*: prompts
that begin with one of a number of long prefixes, as with system prompts or documents; *uniform*: prompts that have
nothing in common. Client and server share this machine's cores, so keep rates low. Not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.peers import running, serving

REPLICAS = 4
BLOCK = 32
PREFIXES, PREFIX_BLOCKS, TAIL_TOKENS = 16, 50, 40
CACHED_PREFIXES = 6  # that a replica has blocks for
UNIFORM_TOKENS = 400
ANSWER_TOKENS = 16
ENGINE = {"mock-prefill-ms-per-token": 0.2, "mock-step-ms": 5, "num-blocks": CACHED_PREFIXES * PREFIX_BLOCKS}
WARM = 0.25  # share of the requests that only fill caches
START_TIMEOUT_S = 180

Prompt = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    ttft_ms: list[float]
    hit_rate: float  # tokens found in caches, of all prompt tokens
    requests: float  # of the busiest replica, by those of the idlest
    computed: float  # the same of prompt tokens that were not cached


def shared_prompts(count: int, rng: random.Random) -> list[Prompt]:
    prefixes = [_tokens(PREFIX_BLOCKS * BLOCK, rng) for _ in range(PREFIXES)]
    return [rng.choice(prefixes) + _tokens(TAIL_TOKENS, rng) for _ in range(count)]


def uniform_prompts(count: int, rng: random.Random) -> list[Prompt]:
    return [_tokens(UNIFORM_TOKENS, rng) for _ in range(count)]


def _tokens(count: int, rng: random.Random) -> Prompt:
    return [rng.randrange(1000, 29_000) for _ in range(count)]


async def first_token_s(client: httpx.AsyncClient, prompt: Prompt) -> float:
    """Streams an answer to its end."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    start, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - start
    if response.status_code != 200 or not first:
        raise RuntimeError(f"a request failed with status {response.status_code}")
    return first


async def run(port: int, prompts: Sequence[Prompt], rate: float, rng: random.Random) -> Outcome:
    """Sends the prompts at Poisson times. The first ones warm caches up and don't count."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        warm = round(WARM * len(prompts))
        await _send(client, prompts[:warm], rate, rng)
        before = await _metrics(client)
        times = await _send(client, prompts[warm:], rate, rng)
        after = await _metrics(client)
    gained = {name: {r: after[name][r] - before[name].get(r, 0.0) for r in after[name]} for name in after}
    queries, hits = gained["vllm:prefix_cache_queries_total"], gained["vllm:prefix_cache_hits_total"]
    return Outcome(
        ttft_ms=sorted(1e3 * seconds for seconds in times),
        hit_rate=sum(hits.values()) / sum(queries.values()),
        requests=_imbalance(gained["vllm:request_success_total"]),
        computed=_imbalance({replica: queries[replica] - hits[replica] for replica in queries}),
    )


async def _send(client: httpx.AsyncClient, prompts: Sequence[Prompt], rate: float, rng: random.Random) -> list[float]:
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(first_token_s(client, prompt)))
        await asyncio.sleep(rng.expovariate(rate))
    return await asyncio.gather(*tasks)


async def _metrics(client: httpx.AsyncClient) -> dict[str, dict[str, float]]:
    """Samples by name and replica, those with other labels added up."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if "replica" in sample.labels and family.name.startswith("vllm:"):
                by_replica = found.setdefault(sample.name, {})
                by_replica[sample.labels["replica"]] = by_replica.get(sample.labels["replica"], 0.0) + sample.value
    return found


def _imbalance(by_replica: dict[str, float]) -> float:
    least = min(by_replica.values())
    return max(by_replica.values()) / least if least else float("inf")


@contextmanager
def server(policy: str, port: int) -> Iterator[None]:
    """A running `sliceserve serve` with four mock engines."""
    options = {"backend": "mock", "data-parallel-size": REPLICAS, "routing-policy": policy, **ENGINE}
    flags = [f"--{name}={value}" for name, value in options.items()]
    with running(serving(port, *flags), start_deadline_s=START_TIMEOUT_S):
        _wait_for_all(port)
        yield


def _wait_for_all(port: int) -> None:
    """Ready means that one engine is; these measurements need all."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=15).text
        if text.count("vllm:num_requests_running{") == REPLICAS:
            return
        time.sleep(0.5)
    raise RuntimeError("not all engines started")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="prefix,least_loaded,round_robin")
    parser.add_argument("--port", type=int, default=8240)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.requests} requests, {args.rate:g}/s")
    print("policy        workload  TTFT p50 ms    p90 ms    p99 ms  hit rate  max/min requests  max/min computed")
    for policy in args.policies.split(","):
        with server(policy, args.port):
            for number, (name, make) in enumerate((("shared", shared_prompts), ("uniform", uniform_prompts))):
                rng = random.Random(args.seed + number)  # the same prompts for each policy
                outcome = asyncio.run(run(args.port, make(args.requests, rng), args.rate, rng))
                p50, p90, p99 = (outcome.ttft_ms[int(q * len(outcome.ttft_ms))] for q in (0.5, 0.9, 0.99))
                print(
                    f"{policy:<13} {name:<8} {p50:>12.0f} {p90:>9.0f} {p99:>9.0f} {outcome.hit_rate:>9.2f} "
                    f"{outcome.requests:>17.2f} {outcome.computed:>17.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
