"""Ray Serve's controller is killed while streams are open: serving goes on, and so does repair afterwards."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.chaos.faults import engines, eventually, kill, processes
from tests.chaos.streams import problems, traffic
from tests.cluster.apps import completion, deployed

pytestmark = pytest.mark.matrix

RECOVERY_TIMEOUT_S = 90.0


async def test_serving_goes_on_without_the_controller_and_repair_goes_on_with_the_next_one(serve_url: str) -> None:
    with deployed(serve_url, "headless", mock_step_ms=10, data_parallel_size=2) as url:
        async with traffic(url, streams=8, max_tokens=200) as running:
            await asyncio.sleep(1)
            [controller] = processes("ray::ServeController")
            kill(controller)
            await asyncio.sleep(2)
            answer = await asyncio.to_thread(completion, url)
            assert answer.status_code == 200
            restarted = await eventually(
                lambda: [p for p in processes("ray::ServeController") if p.pid != controller.pid], RECOVERY_TIMEOUT_S
            )
            victim = engines("headless")[0]
            kill(victim)
            repaired = await eventually(lambda: len(engines("headless")) == 2, RECOVERY_TIMEOUT_S)
            answers = await running.stop()
        assert problems(answers) == []
        assert httpx.get(f"{url}/health", timeout=15).status_code == 200
        print(f"controller back after {restarted + 2:.1f} s, a dead engine then replaced within {repaired:.1f} s")
