"""The prefix store through Serve: two engines, and what a client sees of one that finds what the other computed."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
import ray

from cluster.prefix_store.actor import actor_name
from tests.cluster.apps import completion as any_completion
from tests.cluster.apps import deployed, eventually, metric, replica_processes
from tests.cluster.prefix_store.actors import store_exists

APPLICATION = "stored"
LENGTH, STORED = 2000, 1984  # tokens of a prompt; of its full blocks


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    options = {
        "data_parallel_size": 2,
        "kv_store": "object_store",
        "kv_store_gib": 0.1,
        "routing_policy": "round_robin",
        "mock_kv_bytes_per_token": 1024,
    }
    with deployed(serve_url, APPLICATION, **options) as address:
        eventually(lambda: connected(address) == 2, 30)
        yield address
    eventually(lambda: not store_exists(APPLICATION))


def connected(url: str) -> int:
    return sum(value == 1 for value in metric(url, "sliceserve_kv_store_connected").values())


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 20000), k=LENGTH)


def completion(url: str, tokens: list[int]) -> httpx.Response:
    return any_completion(url, prompt=tokens, temperature=0, timeout=10)


def hit_tokens(url: str) -> dict[str, float]:
    return metric(url, "sliceserve_kv_store_hit_tokens_total")


def computed_by(url: str, tokens: list[int]) -> tuple[str, str]:
    """Has a new prompt computed and stored; says by which replica, and its text."""
    before = metric(url, "vllm:prompt_tokens_total")
    answer = completion(url, tokens).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = metric(url, "vllm:prompt_tokens_total")
    [replica] = [name for name in after if after[name] > before.get(name, 0)]
    return replica, answer["choices"][0]["text"]


def stored_bytes(url: str) -> float:
    return sum(metric(url, "sliceserve_kv_store_written_bytes_total").values())


def used_bytes(url: str) -> float:
    return sum(metric(url, "sliceserve_kv_store_used_bytes").values())


def test_a_prefix_computed_on_one_replica_is_a_hit_on_the_other(url: str) -> None:
    before = stored_bytes(url)
    replica, text = computed_by(url, prompt(1))
    eventually(lambda: stored_bytes(url) - before == STORED * 1024)
    eventually(lambda: STORED * 1024 <= used_bytes(url) < 1.1 * STORED * 1024)  # and not once per replica
    [other] = set(hit_tokens(url)) - {replica}
    answers = [completion(url, prompt(1)).json() for _ in range(2)]  # each replica one
    assert [answer["choices"][0]["text"] for answer in answers] == [text] * 2
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [STORED] * 2
    eventually(lambda: hit_tokens(url)[other] == STORED)
    assert hit_tokens(url)[replica] == 0


def test_ray_shows_our_metrics_of_each_replica_and_the_stores_actors_by_name(url: str) -> None:
    ours = ("ray_vllm_prompt_tokens_total", "ray_sliceserve_kv_store_connected", "ray_vllm_e2e_request_latency_seconds")
    replicas = set(hit_tokens(url))
    eventually(lambda: all(replicas <= shown_by_ray(name) for name in ours), 30)
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert actor_name(APPLICATION) in names
    assert any(name.startswith(f"{actor_name(APPLICATION)}:") for name in names), "no keeper"


def shown_by_ray(metric_name: str) -> set[str]:
    """The replicas of which this node's metrics port has a metric, as Ray's dashboard asks for it."""
    [node] = ray.nodes()
    page = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=15).text
    lines = (line for line in page.splitlines() if line.startswith(metric_name))
    return {label[1] for line in lines if (label := re.search(r'replica="(\w+)"', line))}


def test_a_prefix_outlives_the_replica_that_computed_it(url: str) -> None:
    before = stored_bytes(url)
    texts = dict(computed_by(url, prompt(seed)) for seed in (2, 3))
    seeds = dict(zip(texts, (2, 3), strict=True))
    eventually(lambda: stored_bytes(url) - before == 2 * STORED * 1024)
    replica_processes(APPLICATION, "Engine")[0].kill()
    eventually(lambda: len(set(hit_tokens(url)) & set(texts)) == 1)
    [left] = set(hit_tokens(url)) & set(texts)
    [gone] = set(texts) - {left}
    answer = completion(url, prompt(seeds[gone])).json()
    assert answer["choices"][0]["text"] == texts[gone]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == STORED


def store_process() -> psutil.Process:
    """Of the only store there is."""
    titles = [(" ".join(process.info["cmdline"] or []), process) for process in psutil.process_iter(["cmdline"])]
    [found] = [process for title, process in titles if title.startswith("ray::PrefixStore") and "Keeper" not in title]
    return found


def test_requests_go_on_while_the_store_hangs_and_when_it_has_died(url: str) -> None:
    process = store_process()
    process.send_signal(signal.SIGSTOP)
    answers = [completion(url, prompt(seed)) for seed in (1, 1, 4, 4)]
    assert {answer.status_code for answer in answers} == {200}
    process.kill()
    answers = [completion(url, prompt(seed)) for seed in (1, 5)]
    assert {answer.status_code for answer in answers} == {200}
    eventually(lambda: connected(url) == 2 and len(hit_tokens(url)) == 2, 60)
    before = stored_bytes(url)
    computed_by(url, prompt(6))
    eventually(lambda: stored_bytes(url) > before)
