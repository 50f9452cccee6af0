"""Engines that hang and engines that die, as a client sees them: an error with its reason, then a new engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.cluster.apps import completion, deployed, eventually, replica_processes


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=20)


def test_an_engine_that_dies_ends_its_streams_with_an_error_and_is_replaced(serve_url: str) -> None:
    with deployed(serve_url, "frail", mock_step_ms=50) as url:
        [engine] = replica_processes("frail", "Engine")
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            engine.kill()
            last = list(lines)[-1]
        assert "engine" in json.loads(last.removeprefix("data: "))["error"]["message"]
        eventually(lambda: completion(url).status_code == 200, 60)
        assert replica_processes("frail", "Engine") != [engine]
        assert health(url).status_code == 200


def test_an_engine_that_hangs_says_so_its_clients_get_an_error_and_it_is_replaced(serve_url: str) -> None:
    hanging = {"mock_step_ms": 10_000_000, "step_deadline_s": 1, "warmup": False}
    with deployed(serve_url, "stuck", **hanging) as url, ThreadPoolExecutor(1) as pool:
        [engine] = replica_processes("stuck", "Engine")
        answer = pool.submit(completion, url, timeout=180)
        eventually(lambda: health(url).status_code == 503, 15)
        assert "no step for" in health(url).json()["error"]["message"]
        failed = answer.result(180)
        assert failed.status_code >= 500
        assert failed.json()["error"]["message"]
        eventually(lambda: health(url).status_code == 200, 60)
        eventually(lambda: engine not in replica_processes("stuck", "Engine"), 60)
