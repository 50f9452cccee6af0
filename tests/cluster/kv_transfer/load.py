"""Requests in random order, lengths and with random fates, and what is left behind when all have ended."""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ray
from ray._private import worker
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from tests.cluster.apps import completion, eventually, metric, num_running, replica_processes

SERVES_OWN = 300_000
"""Bytes. Serve's controller has one or two objects of 110 kB of its own, which come and go as replicas do. An object
with a prompt's KV is larger: a hundred tokens of 4 KiB."""


def total(url: str, name: str, **labels: str) -> float:
    return sum(metric(url, name, **labels).values())


def is_well(url: str) -> bool:
    return bool(httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"})


def stored_bytes() -> int:
    """Bytes in the object store."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)


def held_bytes() -> int:
    """Bytes in the object store that something holds, in the next of its reports, of which it writes one a minute. What
    nothing holds is evicted when others need the space: the result of a call whose caller dies meanwhile stays until
    then (Ray 2.60)."""
    node = worker._global_node
    assert node is not None
    log = Path(node.get_logs_dir_path()) / "raylet.out"
    since = log.stat().st_size
    reports: list[str] = []

    def has_come() -> bool:
        with log.open(errors="replace") as lines:
            lines.seek(since)
            reports[:] = re.findall(r"^- bytes in use: (\d+)$", lines.read(), re.MULTILINE)
        return bool(reports)

    eventually(has_come, 75)
    return int(reports[-1])


def prompt(rng: random.Random, *, shortest: int = 20, longest: int = 1000) -> list[int]:
    start = rng.randrange(300, 20000)
    return list(range(start, start + rng.randrange(shortest, longest)))


class Load:
    """Answers must be those that `reference` gives."""

    def __init__(self, url: str, reference: Callable[[list[int], int], list[str]], seed: int) -> None:
        self.url = url
        self.reference = reference
        self.rng = random.Random(seed)
        self.wrong: list[object] = []
        self.answered = self.cancelled = 0

    def run(self, num_requests: int, *, threads: int = 8) -> None:
        jobs = [(prompt(self.rng), self.rng.randrange(1, 30), self.rng.random() < 0.3) for _ in range(num_requests)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._one, jobs))

    def _one(self, job: tuple[list[int], int, bool]) -> None:
        tokens, count, cancels = job
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        if cancels:
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(f"{self.url}/v1/completions", json=body, timeout=self.rng.uniform(0.001, 0.3))
            self.cancelled += 1
            return
        answer = completion(self.url, **body)
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != self.reference(tokens, count):
            self.wrong.append((answer.status_code, answer.text[:200], len(tokens), count))
        self.answered += 1


class Killer:
    """Kills replicas of a deployment at random times until it is left."""

    def __init__(
        self,
        application: str,
        deployment: str,
        rng: random.Random,
        *,
        every_s: tuple[float, float],
        most: float = math.inf,
        among: int = 0,
    ) -> None:
        """Kills at most so many times, and only while so many are running."""
        self._names = (application, deployment)
        self._rng = rng
        self._every_s = every_s
        self._most = most
        self._among = among
        self.kills = 0
        self._stopped = False
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Killer:
        self._pool.submit(self._run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._stopped and self.kills < self._most:
            time.sleep(self._rng.uniform(*self._every_s))
            if self._among and num_running(*self._names) < self._among:
                continue
            for process in replica_processes(*self._names)[:1]:
                with contextlib.suppress(Exception):
                    process.kill()
                    self.kills += 1


def assert_nothing_left(url: str, before: int, stored: Callable[[], int] = stored_bytes) -> None:
    """All blocks, transfers and objects are as they were."""

    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    transfers = ("sliceserve_kv_transfers_open", "sliceserve_kv_transfer_bytes_in_flight")
    left: dict[str, float] = {}

    def is_clean() -> bool:
        left.clear()
        left.update({name: count for name in (*names, *transfers) if (count := total(url, name))})
        if (grown := stored() - before) > SERVES_OWN:
            left["bytes"] = grown
        return not left

    try:
        eventually(is_clean, 30)
    except AssertionError:
        raise AssertionError(f"left: {left}") from None
