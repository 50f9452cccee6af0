"""An ingress is killed: its own streams break so that the client can tell, the other one's clients notice nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.faults import eventually, ingresses, kill
from tests.chaos.streams import Asked, http_client, problems, stream
from tests.cluster.apps import completion, deployed, metric

pytestmark = pytest.mark.matrix


async def test_streams_of_an_ingress_that_dies_break_and_the_others_go_on(serve_url: str) -> None:
    with deployed(serve_url, "doors", mock_step_ms=10, num_ingress_replicas=2) as url:
        async with http_client() as client:
            asked = [Asked(prompt=(1000 + index,) * 20, max_tokens=400) for index in range(16)]
            tasks = [asyncio.create_task(stream(client, url, one)) for one in asked]
            await asyncio.sleep(1.5)
            kill(ingresses("doors")[0])
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
            back = await eventually(lambda: len(metric(url, "sliceserve_http_requests_open")) == 2, 60)
        kinds = sorted({answer.error.split(":")[0] for answer in broken})
        print(f"{len(broken)} of 16 streams broke ({', '.join(kinds)}), the ingress was back after {back:.1f} s")
