"""Engines that hang and engines that die, as a client sees them, beside an application that goes on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.cluster.apps import completion, deployed, eventually, replica_processes


def test_a_hanging_engine_is_unhealthy_and_a_dead_one_is_replaced(serve_url: str) -> None:
    with deployed(serve_url, "frail", mock_step_ms=50, step_deadline_s=2) as url:
        [engine] = replica_processes("frail", "Engine")
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            engine.kill()
            last = list(lines)[-1]
        assert "engine" in json.loads(last.removeprefix("data: "))["error"]["message"]
        refused = completion(url)
        assert refused.status_code in (200, 503)  # 200 once the replacement is up
        eventually(lambda: completion(url).status_code == 200, 60)
        assert httpx.get(f"{url}/health", timeout=15).status_code == 200


def test_health_says_so_when_a_step_takes_longer_than_its_deadline(serve_url: str) -> None:
    with deployed(serve_url, "slow", mock_step_ms=2500, step_deadline_s=0.5) as url, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(completion, url, max_tokens=2)
        eventually(lambda: httpx.get(f"{url}/health", timeout=15).status_code == 503, 10)
        health = httpx.get(f"{url}/health", timeout=15)
        assert health.status_code != 503 or "no step" in health.json()["error"]["message"]
        assert answer.result().status_code in (200, 500, 503)
