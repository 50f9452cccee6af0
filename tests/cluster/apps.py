"""Applications with the mock backend on the session's Ray, and what tests want to know about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from cluster import ray_compat
from cluster.app import build_app

START_TIMEOUT_S = 120.0


@contextmanager
def deployed(serve_url: str, name: str, **options: object) -> Iterator[str]:
    """Runs an application and yields its URL."""
    ray_compat.deploy(build_app({"backend": "mock", **options}), name=name, route_prefix=f"/{name}")
    try:
        eventually(lambda: serve.status().applications[name].status == "RUNNING", START_TIMEOUT_S)
        yield f"{serve_url}/{name}"
    finally:
        serve.delete(name)


def eventually(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.05)


def completion(url: str, *, timeout: float = 60.0, **fields: object) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)


def metric(url: str, name: str, **labels: str) -> dict[str, float]:
    """The samples of one name whose labels match, by replica."""
    text = httpx.get(f"{url}/metrics", timeout=15).text
    return {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


def num_running(application: str, deployment: str) -> int:
    """Replicas that Serve says are running."""
    states = serve.status().applications[application].deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def replica_processes(application: str, deployment: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas (Ray names them so that people can tell them apart)."""
    title = f"ray::ServeReplica:{application}:{deployment}"
    return [process for process in psutil.process_iter(["cmdline"]) if title in " ".join(process.info["cmdline"] or [])]
