"""Time per token of running streams while long prompts arrive, with one pool and with two."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.disaggregation.common import PORT, application, ray_with_serve
from cluster.app import build_app

STREAMS, STREAM_TOKENS, PROMPT_TOKENS, PROMPT_EVERY_S = 4, 300, 1500, 2.0
TPOT_OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_running_seqs": 8, "max_model_len": 2048, "warmup": False}


def tpot(folder: Path, chosen: Sequence[int]) -> None:
    """Running streams with and without long prompts beside them."""
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, "the pools need a core each"
    pools = {"disagg_topo": "1,1", "disagg_min_prefill_tokens": 256}
    cases: list[tuple[str, dict[str, Any], dict[str, list[int]]]] = [
        ("unified, one core", {}, {"Engine": cores[-1:]}),
        ("unified, all cores", {}, {"Engine": cores}),
        # Everything else on this machine, the clients included, runs on the first cores.
        ("decode with a core of its own", pools, {"Engine": cores[-1:], "Prefill": cores[:-1]}),
        ("prefill with a core of its own", pools, {"Engine": cores[:-1], "Prefill": cores[-1:]}),
    ]
    print("| case | long prompts | TPOT p50 (ms) | TPOT p99 (ms) | longest gap (ms) | TTFT of long prompts p50 (s) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, options, pins in [cases[index] for index in chosen]:
        with ray_with_serve(folder), application(build_app({**TPOT_OPTIONS, **options}), "tpot"):
            _streams(True)  # compiles what is needed
            for deployment, where in pins.items():
                pin(deployment, where)
            for busy in (False, True):
                gaps, ttfts = _streams(busy)
                middle = f"{statistics.median(ttfts):.2f}" if ttfts else ""
                print(
                    f"| {name} | {'every 2 s' if busy else 'none'} | {np.percentile(gaps, 50) * 1e3:.0f} | "
                    f"{np.percentile(gaps, 99) * 1e3:.0f} | {max(gaps) * 1e3:.0f} | {middle} |",
                    flush=True,
                )


def pin(deployment: str, cores: list[int]) -> None:
    """Confines all threads of a deployment's replicas."""
    title = f"ray::ServeReplica:tpot:{deployment}"
    for process in psutil.process_iter(["cmdline"]):
        if title in " ".join(process.info["cmdline"] or []):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def _streams(busy: bool) -> tuple[list[float], list[float]]:
    """Seconds between tokens of the streams, and seconds to the first token of the prompts beside them."""
    stop = threading.Event()
    ttfts: list[float] = []
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        prompts = pool.submit(_send_prompts, stop, ttfts) if busy else None
        streams = [pool.submit(_gaps, number) for number in range(STREAMS)]
        gaps = [gap for stream in streams for gap in stream.result()]
        stop.set()
        if prompts is not None:
            prompts.result()
    return gaps, ttfts


def _gaps(number: int) -> list[float]:
    body = {
        "prompt": [1000 + number] * 16,
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    times = []
    with httpx.stream("POST", f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


def _send_prompts(stop: threading.Event, ttfts: list[float]) -> None:
    rng = np.random.default_rng()
    while not stop.wait(PROMPT_EVERY_S):
        body = {"prompt": rng.integers(1000, 40000, PROMPT_TOKENS).tolist(), "max_tokens": 1, "temperature": 0}
        started = time.perf_counter()
        httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=300).raise_for_status()
        ttfts.append(time.perf_counter() - started)
