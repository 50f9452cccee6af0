"""A replica stands still (SIGSTOP) for good, or is the only one and dies: streams go on elsewhere, or with the next."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from cluster import frames
from tests.chaos.faults import engines, eventually
from tests.chaos.streams import problems, traffic
from tests.cluster.apps import completion, deployed

pytestmark = pytest.mark.matrix

SILENCE_S = (frames.MISSED_SIGNS + 1) * frames.SIGN_OF_LIFE_S


async def test_streams_of_a_replica_that_stands_still_go_on_elsewhere(serve_url: str) -> None:
    with deployed(serve_url, "still", mock_step_ms=10, data_parallel_size=2) as url:
        async with traffic(url, streams=8, max_tokens=300) as running:
            await asyncio.sleep(1.5)
            victim = engines("still")[0]
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(SILENCE_S + 2)
            assert (await asyncio.to_thread(httpx.get, f"{url}/health", timeout=15)).status_code == 200
            assert (await asyncio.to_thread(completion, url)).status_code == 200
            gone = await eventually(lambda: not victim.is_running(), 120)
            await eventually(lambda: len(engines("still")) == 2, 60)
            answers = await running.stop()
        assert problems(answers) == []
        gap = max(answer.longest_gap_s for answer in answers)
        assert gap < SILENCE_S + 3
        print(f"longest gap of a stream {gap:.1f} s; Serve killed the replica after {gone + SILENCE_S + 2:.0f} s")


async def test_one_replica_alone_is_waited_for(serve_url: str) -> None:
    with deployed(serve_url, "alone", mock_step_ms=10) as url:
        async with traffic(url, streams=4, max_tokens=200) as running:
            await asyncio.sleep(1)
            [victim] = engines("alone")
            victim.kill()
            refused = await asyncio.to_thread(completion, url)
            answers = await running.stop()
        assert problems(answers) == []
        assert refused.status_code in (200, 503)
        assert refused.status_code == 200 or int(refused.headers["retry-after"]) >= 1
        gap = max(answer.longest_gap_s for answer in answers)
        print(f"streams went on {gap:.1f} s after the only replica's death")
