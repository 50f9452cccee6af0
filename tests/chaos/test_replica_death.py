"""Engine replicas are killed at random points while streams are open: every stream ends with its whole, right text."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos.faults import engines, eventually, kill
from tests.chaos.streams import problems, traffic
from tests.cluster.apps import deployed, metric

REPLICAS = 2
RESTART_TIMEOUT_S = 60.0


@pytest.mark.parametrize("kills", [pytest.param(5, id="short"), pytest.param(100, id="long", marks=pytest.mark.matrix)])
async def test_streams_survive_replicas_that_are_killed_at_random_points(serve_url: str, kills: int) -> None:
    source = random.Random(kills)
    options = {"mock_step_ms": 10, "data_parallel_size": REPLICAS, "max_decode_seqs": 64}
    with deployed(serve_url, "killed", **options) as url:
        async with traffic(url, streams=12, max_tokens=150, seed=kills) as running:
            for _ in range(kills):
                await asyncio.sleep(source.uniform(0.1, 1.5))
                victims = await asyncio.to_thread(engines, "killed")
                if victims:
                    kill(source.choice(victims))
                await eventually(lambda: engines("killed"), RESTART_TIMEOUT_S)
            answers = await running.stop()
        assert problems(answers) == []
        assert len(answers) >= 12
        resumed = await asyncio.to_thread(metric, url, "sliceserve_resumptions_total", outcome="resumed")
        assert sum(resumed.values()) >= 1
        gap = max(answer.longest_gap_s for answer in answers)
        print(
            f"{kills} kills, {len(answers)} streams, {sum(resumed.values()):.0f} resumptions, longest gap {gap:.1f} s"
        )
