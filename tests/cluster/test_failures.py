"""Engines that hang and engines that die, as a client sees them: a stream that goes on, or an error with its reason."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from tests.cluster.apps import completion, deployed, eventually, metric, replica_processes


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=20)


def test_an_engine_that_dies_is_replaced_and_its_streams_go_on_with_the_new_one(serve_url: str) -> None:
    with deployed(serve_url, "frail", mock_step_ms=20) as url:
        deployments = serve.status().applications["frail"].deployments
        assert [dict(d.replica_states) for d in deployments.values()] == [{"RUNNING": 1}] * 2
        whole = completion(url, max_tokens=80, temperature=0).json()
        [engine] = replica_processes("frail", "Engine")
        body = {"prompt": "Once upon a time", "max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": True}
        text, killed = "", False
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if not killed:
                        engine.kill()
                        killed = True
        assert text == whole["choices"][0]["text"]
        assert replica_processes("frail", "Engine") != [engine]
        eventually(lambda: serve.status().applications["frail"].status == "RUNNING", 60)  # UNHEALTHY until then
        assert health(url).status_code == 200


def test_without_time_to_resume_an_engine_that_dies_ends_its_streams_with_an_error(serve_url: str) -> None:
    with deployed(serve_url, "final", mock_step_ms=50, resume_timeout_s=0) as url:
        [engine] = replica_processes("final", "Engine")
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            engine.kill()
            last = list(lines)[-1]
        assert "this request is gone" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.matrix
def test_two_engines_share_the_load_and_one_goes_on_when_the_other_dies(serve_url: str) -> None:
    with deployed(serve_url, "pair", mock_step_ms=20, data_parallel_size=2) as url:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: completion(url, max_tokens=50), range(16)))
        assert [answer.status_code for answer in answers] == [200] * 16
        generated = metric(url, "vllm:generation_tokens_total")
        assert sum(generated.values()) == 16 * 50
        assert len(generated) == 2
        assert min(generated.values()) >= 4 * 50
        replica_processes("pair", "Engine")[0].kill()
        eventually(lambda: len(metric(url, "vllm:generation_tokens_total")) == 1)
        assert [completion(url).status_code for _ in range(8)] == [200] * 8
        eventually(lambda: len(metric(url, "vllm:generation_tokens_total")) == 2, 60)


def test_an_engine_that_hangs_says_so_its_clients_get_an_error_and_it_is_replaced(serve_url: str) -> None:
    hanging = {"mock_step_ms": 10_000_000, "step_deadline_s": 1, "warmup": False, "resume_timeout_s": 0}
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
