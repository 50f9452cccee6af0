"""A gang behind Serve: it answers over HTTP, ends as a whole with any of its processes, and comes up again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
import ray

from tests.cluster.apps import completion, deployed, eventually, replica_processes

APP = "gang"
DEADLINE_S = 3.0


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    options = {"num_hosts": 2, "tensor_parallel_size": 4, "max_decode_seqs": 8, "step_deadline_s": DEADLINE_S}
    with deployed(serve_url, APP, **options) as url:
        yield url
    eventually(lambda: not workers())


def workers() -> dict[str, psutil.Process]:
    """The gang's processes that are alive, by their actors' names without the replica's."""
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    ours = [name for name in names if name.startswith(f"sliceserve:{APP}:") and ":worker:" in name]
    found = {}
    for name in ours:
        try:
            described = ray.get(ray.get_actor(name, namespace="serve").describe.remote(), timeout=5)
        except (ValueError, ray.exceptions.RayError):  # it has just ended
            continue
        found[name.split(":")[-1]] = psutil.Process(described.pid)
    return found


def answers(url: str) -> bool:
    try:
        return completion(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_workers_have_names_and_their_engine_answers(url: str) -> None:
    assert sorted(workers()) == ["0", "1"]
    answer = completion(url, max_tokens=20).json()
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.matrix)])
def test_a_gang_ends_and_comes_back_with_any_of_its_workers(url: str, sent: signal.Signals) -> None:
    eventually(lambda: answers(url), 60)
    before = list(workers().values())
    started = time.monotonic()
    before[1].send_signal(sent)
    eventually(lambda: gone(before), DEADLINE_S + 3)
    assert time.monotonic() - started < DEADLINE_S + 3
    eventually(lambda: answers(url), 60)
    assert not {process.pid for process in before} & {process.pid for process in workers().values()}


def test_no_worker_outlives_its_leader(url: str) -> None:
    eventually(lambda: answers(url), 60)
    before = list(workers().values())
    assert len(before) == 2
    [leader] = replica_processes(APP, "Engine")
    leader.kill()
    eventually(lambda: gone(before), 3)
    eventually(lambda: answers(url), 60)
