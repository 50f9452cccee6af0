"""What an ingress asks of all replicas: those that hang or are dead neither delay nor hide the others' answers."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayError

from cluster import broadcast, exchange
from cluster.balancer import Balancer
from cluster.client import Health
from cluster.metrics_text import EngineReport, IngressReport, ReplicaLabels
from cluster.ray_client import RayEngineClient
from engine.config import EngineConfig
from engine.metrics import EngineMetrics


class Replicas:
    """A deployment handle whose replicas answer, fail or hang, whatever is asked."""

    deployment_name, app_name = "Engine", "app"

    def __init__(self, *answers: object, listed_after_s: float = 0.0) -> None:
        self._answers = answers
        self._listed_after_s = listed_after_s

    def options(self, **_: object) -> Replicas:
        return self

    def broadcast(self, _method: str) -> Replicas:
        return self

    async def _fetch_replica_results_async(self) -> list[Replica]:
        await asyncio.sleep(self._listed_after_s)
        return [Replica(answer) for answer in self._answers]


class Replica:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def get_async(self) -> object:
        if self._answer is HANGS:
            await asyncio.sleep(60)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


BALANCER = Balancer.of(EngineConfig())
HANGS = object()
HEALTHY = Health(healthy=True, reason="")
STUCK = Health(healthy=False, reason="no step")
DEAD = RayError("the actor died")


@pytest.mark.parametrize(
    ("answers", "health"),
    [
        ((HANGS, HEALTHY), HEALTHY),
        ((DEAD, HANGS, HEALTHY), HEALTHY),
        ((STUCK, HEALTHY), HEALTHY),
        ((STUCK, HANGS), STUCK),
        ((HANGS, DEAD), Health(healthy=False, reason=exchange.NO_ENGINE)),
        ((), Health(healthy=False, reason=exchange.NO_ENGINE)),
    ],
)
async def test_a_replica_that_hangs_or_is_dead_does_not_hide_the_others(
    answers: tuple[object, ...], health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_TIMEOUT_S", 0.1)
    replicas = Replicas(*answers)
    client = RayEngineClient(replicas, replicas, BALANCER, resume_timeout_s=1)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        assert await client.health() == health


@pytest.mark.parametrize("answers", [(HANGS,), (DEAD,)])
async def test_an_engine_that_is_there_and_silent_is_not_taken_for_asleep(
    answers: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_TIMEOUT_S", 0.1)
    replicas = Replicas(*answers)
    client = RayEngineClient(replicas, replicas, BALANCER, resume_timeout_s=1, wake_timeout_s=60)  # type: ignore[arg-type]
    assert await client.health() == Health(healthy=False, reason=exchange.NO_ENGINE)


async def test_one_healthy_replica_is_enough_and_nobody_waits_for_the_others() -> None:
    replicas = Replicas(HANGS, HEALTHY)
    async with asyncio.timeout(broadcast.BROADCAST_TIMEOUT_S / 2):
        assert await RayEngineClient(replicas, replicas, BALANCER, resume_timeout_s=1).health() == HEALTHY  # type: ignore[arg-type]


async def test_all_deployments_together_get_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_TIMEOUT_S", 0.5)
    engines = Replicas(HEALTHY, HANGS, listed_after_s=0.4)
    prefills = Replicas(HANGS, listed_after_s=0.4)
    client = RayEngineClient(engines, engines, BALANCER, resume_timeout_s=1, prefill=prefills)  # type: ignore[arg-type]
    async with asyncio.timeout(0.8):
        health = await client.health()
    assert health.healthy
    assert health.degraded


async def test_metrics_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BROADCAST_TIMEOUT_S", 0.1)
    labels = ReplicaLabels(model_name="m", application="a", replica="good", role="unified")
    engines = Replicas(HANGS, EngineReport(labels=labels, metrics=EngineMetrics().snapshot()))
    ingresses = Replicas(HANGS, IngressReport(labels=labels, responses={}, open_requests=3))
    async with asyncio.timeout(5):
        text = (await RayEngineClient(engines, ingresses, BALANCER, resume_timeout_s=1).metrics_text()).decode()  # type: ignore[arg-type]
    assert 'sliceserve_http_requests_open{application="a",model_name="m",replica="good",role="unified"} 3.0' in text
    assert "vllm:num_requests_running" in text
