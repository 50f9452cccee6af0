"""The whole serving layer on Ray Serve: two ingress replicas in front of one mock engine, through HTTP."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels

from tests.cluster.apps import completion, deployed, eventually, metric, replica_processes

RUNNING, WAITING = 4, 4
PANEL_METRICS = {
    "ray_vllm_num_requests_running",
    "ray_vllm_num_requests_waiting",
    "ray_vllm_kv_cache_usage_perc",
    "ray_vllm_generation_tokens_total",
    "ray_vllm_prompt_tokens_total",
    "ray_vllm_prefix_cache_queries_total",
    "ray_vllm_prefix_cache_hits_total",
    "ray_vllm_request_success_total",
    "ray_vllm_time_to_first_token_seconds_bucket",
    "ray_vllm_request_time_per_output_token_seconds_bucket",
    "ray_vllm_request_prompt_tokens_bucket",
    "ray_vllm_request_prompt_tokens_sum",
    "ray_vllm_request_generation_tokens_bucket",
    "ray_vllm_request_queue_time_seconds_sum",
    "ray_vllm_request_prefill_time_seconds_sum",
    "ray_vllm_request_decode_time_seconds_sum",
}


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    options = {
        "num_ingress_replicas": "2",
        "max_decode_seqs": RUNNING,
        "max_queued_requests": WAITING,
        "mock_step_ms": "20",
        "decode_seqs_padding": 4,
    }
    with deployed(serve_url, "main", **options) as address:
        yield address


def running(url: str) -> float:
    return sum(metric(url, "vllm:num_requests_running").values())


def ended(url: str, reason: str) -> float:
    return sum(metric(url, "vllm:request_success_total", finished_reason=reason).values())


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_is_counted_as_a_stop_and_not_as_a_client_that_left(url: str, streams: bool) -> None:
    whole = completion(url, temperature=0, max_tokens=60).json()["choices"][0]["text"]
    before = {reason: ended(url, reason) for reason in ("stop", "abort")}
    answer = completion(url, temperature=0, max_tokens=60, stop=[whole[40:48]], stream=streams)
    assert '"finish_reason":"stop"' in answer.text
    eventually(lambda: ended(url, "stop") == before["stop"] + 1)
    assert ended(url, "abort") == before["abort"]


def test_an_http_request_of_many_engine_requests_leaves_nothing_behind(url: str) -> None:
    # The first request of all: Serve has to ask the engine for its load, so that calls wait for a replica together.
    answer = completion(url, prompt=["one", "two", "three"], n=2, temperature=1, max_tokens=20)
    assert len(answer.json()["choices"]) == 6
    eventually(lambda: running(url) == 0)
    before = cpu_seconds("main", "Ingress")
    time.sleep(2)
    assert cpu_seconds("main", "Ingress") - before < 1  # one that looks for a replica without end takes all it gets


def cpu_seconds(application: str, deployment: str) -> float:
    times = [process.cpu_times() for process in replica_processes(application, deployment)]
    return sum(spent.user + spent.system for spent in times)


def test_a_streamed_answer_is_the_unstreamed_one(url: str) -> None:
    whole = completion(url, max_tokens=40, temperature=0).json()
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text, usage = "", None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert text == whole["choices"][0]["text"]
    assert usage == whole["usage"]
    assert usage["completion_tokens"] == 40


def test_a_client_that_goes_away_frees_its_place_in_the_engine(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        eventually(lambda: running(url) == 1)
    eventually(lambda: running(url) == 0)  # the answer itself would take 80 s
    eventually(lambda: sum(metric(url, "vllm:request_success_total", finished_reason="abort").values()) >= 1)


def test_more_requests_than_the_queue_holds_are_told_to_come_back(url: str) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: completion(url, max_tokens=100), range(20)))
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) + len(refused) == 20
    assert RUNNING + WAITING <= len(taken) < 20
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("error" in answer.json() for answer in refused)
    assert completion(url).status_code == 200


def test_a_request_that_the_engine_cannot_serve_names_its_field(url: str) -> None:
    answer = completion(url, prompt=list(range(9000)))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_one_scrape_answers_for_all_replicas(url: str) -> None:
    def ingresses() -> dict[str, float]:
        return metric(url, "sliceserve_http_responses_total", route="/v1/completions", code="200")

    def generated() -> float:
        return sum(metric(url, "vllm:generation_tokens_total").values())

    before, tokens = sum(ingresses().values()), generated()
    eventually(lambda: completion(url).status_code == 200 and len(ingresses()) == 2)  # both ingresses had some
    sent = sum(ingresses().values()) - before
    assert generated() - tokens == 4 * sent
    assert len(metric(url, "vllm:num_requests_running")) == 1
    assert len(metric(url, "sliceserve_http_requests_open")) == 2
    assert sum(metric(url, "sliceserve_compilations_after_warmup_total").values()) == 0
    assert sum(metric(url, "vllm:time_to_first_token_seconds_count").values()) >= sent


def test_rays_own_metrics_have_the_names_that_its_llm_panels_ask_for(url: str) -> None:
    for _ in range(2):  # the second one finds the first one's prefix: Ray shows a counter once it has counted
        assert completion(url, prompt="Once upon a time " * 20).status_code == 200
    page = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def exported() -> dict[str, dict[str, str]]:
        families = text_string_to_metric_families(httpx.get(page, timeout=15).text)
        return {sample.name: sample.labels for family in families for sample in family.samples}

    panels = inspect.getsource(serve_llm_dashboard_panels)
    assert all(name.removesuffix("_bucket") in panels for name in PANEL_METRICS)
    eventually(lambda: exported().keys() >= PANEL_METRICS, 45)
    labels = exported()["ray_vllm_time_to_first_token_seconds_bucket"]
    assert labels["model_name"] == "SmolLM2-135M-Instruct"
    assert labels["WorkerId"]
    assert "le" in labels


def test_health_is_good_while_the_engine_works(url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(completion, url, max_tokens=50)
        eventually(lambda: running(url) == 1)
        assert httpx.get(f"{url}/health", timeout=15).status_code == 200
        assert busy.result().status_code == 200


def test_a_burst_larger_than_the_batch_waits_in_the_engines_queue(url: str) -> None:
    with ThreadPoolExecutor(RUNNING + WAITING) as pool:
        answers = list(pool.map(lambda _: completion(url, max_tokens=2), range(RUNNING + WAITING)))
    assert {answer.status_code for answer in answers} == {200}
