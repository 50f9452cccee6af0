"""Each process of a serving cluster is killed or stopped once, in its short form: what its streams and its users see.

Where there is a long form, it runs with `make test-chaos`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from cluster import frames
from tests.chaos.faults import engines, eventually, ingresses, kill, kill_engines, processes
from tests.chaos.streams import Asked, http_client, problems, stream, traffic
from tests.cluster.apps import completion, deployed, metric, num_running

ENGINES = 3
INGRESSES = 2
KILLS = 3
RECOVERY_TIMEOUT_S = 90.0
SILENCE_S = (frames.MISSED_SIGNS + 1) * frames.SIGN_OF_LIFE_S


@pytest.fixture(scope="module")
def application(serve_url: str) -> Iterator[str]:
    options = {"mock_step_ms": 10, "data_parallel_size": ENGINES, "num_ingress_replicas": INGRESSES}
    with deployed(serve_url, "faults", **options, max_decode_seqs=64) as url:
        yield url


def is_whole() -> bool:
    has_engines = num_running("faults", "Engine") == len(engines("faults")) == ENGINES
    return has_engines and num_running("faults", "Ingress") == INGRESSES


@pytest.fixture
async def url(application: str) -> str:
    """Of an application that has nothing left to repair."""
    await eventually(is_whole, RECOVERY_TIMEOUT_S)
    return application


async def test_streams_survive_engines_that_are_killed_at_random_points(url: str) -> None:
    async with traffic(url, streams=12, max_tokens=100, seed=5) as running:
        await kill_engines("faults", KILLS, random.Random(5), RECOVERY_TIMEOUT_S)
        answers = await running.stop()
    begun = [answer for answer in answers if not answer.was_refused]  # as both engines were dead for too long
    assert problems(begun) == []
    assert len(begun) >= 12
    resumed = await asyncio.to_thread(metric, url, "sliceserve_resumptions_total", outcome="resumed")
    assert sum(resumed.values()) >= 1


async def test_streams_of_an_engine_that_stands_still_go_on_elsewhere_and_it_adds_nothing_later(url: str) -> None:
    async with traffic(url, streams=8, max_tokens=300) as running:
        await asyncio.sleep(1)
        victim = engines("faults")[0]
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(SILENCE_S + 1)
        assert (await asyncio.to_thread(completion, url)).status_code == 200
        victim.send_signal(signal.SIGCONT)
        await asyncio.sleep(2)
        answers = await running.stop()
    assert problems(answers) == []
    gap = max(answer.longest_gap_s for answer in answers)
    print(f"longest gap of a stream {gap:.1f} s")
    assert gap < SILENCE_S + 3


def cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


async def test_streams_of_an_ingress_that_dies_break_and_the_others_go_on(url: str) -> None:
    async with http_client() as client:
        asked = [Asked(prompt=(1000 + index,) * 20, max_tokens=400) for index in range(16)]
        before = {process: cpu_seconds(process) for process in ingresses("faults")}
        tasks = [asyncio.create_task(stream(client, url, one)) for one in asked]
        await asyncio.sleep(1.5)
        kill(max(before, key=lambda process: cpu_seconds(process) - before[process]))  # one that has streams
        answers = await asyncio.gather(*tasks)
    broken = [answer for answer in answers if answer.error]
    whole = [answer for answer in answers if not answer.error]
    assert problems(whole) == []
    assert 1 <= len(broken) <= 15
    assert not any(answer.done for answer in broken)
    for answer in broken:  # what had come is right, and cut off
        assert answer.asked.texts()[0].startswith(answer.texts[0])
    # The engine gives up what nobody reads any more.
    await eventually(lambda: sum(metric(url, "vllm:num_requests_running").values()) == 0, 15)
    for _ in range(6):
        assert (await asyncio.to_thread(completion, url)).status_code == 200
    back = await eventually(lambda: len(metric(url, "sliceserve_http_requests_open")) == INGRESSES, 60)
    kinds = sorted({answer.error.split(":")[0] for answer in broken})
    print(f"{len(broken)} of 16 streams broke ({', '.join(kinds)}), the ingress was back after {back:.1f} s")


async def test_serving_goes_on_without_the_controller_and_repair_goes_on_with_the_next_one(url: str) -> None:
    async with traffic(url, streams=8, max_tokens=200) as running:
        await asyncio.sleep(1)
        [controller] = processes("ray::ServeController")
        kill(controller)
        await asyncio.sleep(1)
        assert (await asyncio.to_thread(completion, url)).status_code == 200
        restarted = await eventually(
            lambda: [p for p in processes("ray::ServeController") if p.pid != controller.pid], RECOVERY_TIMEOUT_S
        )
        kill(engines("faults")[0])
        repaired = await eventually(lambda: len(engines("faults")) == ENGINES, RECOVERY_TIMEOUT_S)
        answers = await running.stop()
    assert problems(answers) == []
    assert httpx.get(f"{url}/health", timeout=15).status_code == 200
    print(f"controller back after {restarted + 1:.1f} s, a dead engine then replaced within {repaired:.1f} s")


async def test_a_proxy_that_dies_takes_its_streams_along_and_the_next_one_is_soon_there(url: str) -> None:
    [proxy] = processes("ray::ProxyActor")
    async with http_client() as client:
        asked = Asked(prompt=(1000, 1001), max_tokens=400)
        open_stream = asyncio.create_task(stream(client, url, asked))
        await asyncio.sleep(1)
        kill(proxy)
        assert (await open_stream).error
        back = await eventually(lambda: is_answered(url), RECOVERY_TIMEOUT_S)
    await eventually(lambda: sum(metric(url, "vllm:num_requests_running").values()) == 0, 15)
    print(f"the proxy was back after {back:.1f} s")


def is_answered(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return completion(url).status_code == 200
    return False
