"""Engine replicas are killed while streams are open, many or one: every stream ends with its whole, right text."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos.faults import engines, kill, kill_engines
from tests.chaos.streams import problems, traffic
from tests.cluster.apps import deployed, metric

pytestmark = pytest.mark.matrix

REPLICAS = 3
KILLS = 100
RESTART_TIMEOUT_S = 60.0


async def test_streams_survive_a_hundred_engines_that_are_killed_at_random_points(serve_url: str) -> None:
    options = {"mock_step_ms": 10, "data_parallel_size": REPLICAS, "max_decode_seqs": 64}
    with deployed(serve_url, "killed", **options) as url:
        async with traffic(url, streams=12, max_tokens=100, seed=KILLS) as running:
            await kill_engines("killed", KILLS, random.Random(KILLS), RESTART_TIMEOUT_S)
            answers = await running.stop()
        refused = [answer for answer in answers if answer.was_refused]  # both engines were dead for too long
        begun = [answer for answer in answers if not answer.was_refused]
        assert problems(begun) == []
        assert len(begun) >= 12
        resumed = await asyncio.to_thread(metric, url, "sliceserve_resumptions_total", outcome="resumed")
        assert sum(resumed.values()) >= 1
        gap = max(answer.longest_gap_s for answer in begun)
        print(
            f"{KILLS} kills, {len(begun)} streams, {sum(resumed.values()):.0f} resumptions, longest gap {gap:.1f} s; "
            f"{len(refused)} requests were told to come back"
        )


async def test_streams_change_to_a_living_replica_at_once(serve_url: str) -> None:
    with deployed(serve_url, "change", mock_step_ms=10, data_parallel_size=REPLICAS) as url:
        async with traffic(url, streams=16, max_tokens=300) as running:
            await asyncio.sleep(2)
            kill((await asyncio.to_thread(engines, "change"))[0])
            await asyncio.sleep(1)
            answers = await running.stop()
        assert problems(answers) == []
        gap = max(answer.longest_gap_s for answer in answers)
        print(f"longest gap of a stream {gap:.2f} s")
        assert gap < 2
