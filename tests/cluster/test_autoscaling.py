"""How many replicas there are: the policy by itself, and Serve acting on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.app import build_app
from cluster.autoscaling import (
    Autoscaler,
    EngineSignals,
    PoolState,
    ScalingOptions,
    ServePolicy,
    scaling_options,
    serve_options,
)
from cluster.roles import Role
from cluster.scaling_signals import WINDOW_S, SignalWindow
from engine.config import ConfigError, EngineConfig
from engine.limits import Limits
from engine.metrics import EngineMetrics
from engine.pools import prefill_config
from tests.cluster.apps import completion, deployed, eventually, metric

IDLE = EngineSignals(
    running=0,
    waiting=0,
    slots=100,
    queued_tokens=0,
    step_tokens=1000,
    kv_usage=0.0,
    first_tokens=0,
    first_tokens_in_time=0,
    tokens=0,
    tokens_in_time=0,
)
BUSY = replace(
    IDLE, running=40, kv_usage=0.4, first_tokens=100, first_tokens_in_time=99, tokens=900, tokens_in_time=899
)


def pool(*signals: EngineSignals, target: int | None = None, open_requests: float | None = None) -> PoolState:
    running = sum(one.running + one.waiting for one in signals)
    return PoolState(
        target=len(signals) if target is None else target,
        ready=len(signals),
        open_requests=running if open_requests is None else open_requests,
        signals=signals,
    )


def scaler(role: Role = Role.UNIFIED, *, least: int = 1, most: int = 10, delay_s: float = 100.0) -> Autoscaler:
    options = ScalingOptions(role=role, min_replicas=least, max_replicas=most, downscale_delay_s=delay_s)
    return Autoscaler(options)


def test_a_pool_with_enough_to_do_stays_as_it_is() -> None:
    autoscaler = scaler()
    assert [autoscaler.decide(pool(BUSY, BUSY, BUSY), now) for now in range(0, 1000, 10)] == [3] * 100


@pytest.mark.parametrize(
    ("signals", "wanted"),
    [
        (replace(IDLE, running=100, kv_usage=0.2), 3),  # places in the batch
        (replace(IDLE, running=50, waiting=100, kv_usage=0.2), 4),
        (replace(IDLE, running=20, waiting=10, kv_usage=0.95), 4),  # those who wait need KV, too
        (replace(IDLE, running=10, queued_tokens=5000), 3),  # prompts
        (replace(IDLE, running=90, queued_tokens=90_000), 4),  # at most twice as many
    ],
)
def test_a_pool_grows_to_what_its_load_needs(signals: EngineSignals, wanted: int) -> None:
    assert scaler().decide(pool(signals, signals), 0.0) == wanted


def test_each_role_looks_at_its_own_signals() -> None:
    prompts = replace(IDLE, running=10, queued_tokens=5000)
    sequences = replace(IDLE, running=100, kv_usage=0.99)
    assert scaler(Role.PREFILL).decide(pool(prompts, prompts), 0.0) == 3
    assert scaler(Role.PREFILL).decide(pool(sequences, sequences), 0.0) == 2
    assert scaler(Role.DECODE).decide(pool(prompts, prompts), 0.0) == 2
    assert scaler(Role.DECODE).decide(pool(sequences, sequences), 0.0) == 3


@pytest.mark.parametrize(
    ("role", "late", "wanted"),
    [
        (Role.UNIFIED, replace(BUSY, first_tokens_in_time=80), 3),
        (Role.UNIFIED, replace(BUSY, tokens_in_time=600), 3),
        (Role.PREFILL, replace(BUSY, tokens_in_time=600), 2),
        (Role.DECODE, replace(BUSY, first_tokens_in_time=80), 2),
        (Role.UNIFIED, replace(BUSY, first_tokens=4, first_tokens_in_time=0), 2),  # too few to say
    ],
)
def test_users_who_wait_too_long_add_a_replica(role: Role, late: EngineSignals, wanted: int) -> None:
    assert scaler(role).decide(pool(late, late), 0.0) == wanted


def test_what_was_late_before_the_last_step_up_does_not_count_again() -> None:
    autoscaler = scaler()
    late = replace(BUSY, first_tokens_in_time=50)
    assert autoscaler.decide(pool(late, late), 0.0) == 3
    assert autoscaler.decide(pool(late, late, target=3), 5.0) == 3
    assert autoscaler.decide(pool(late, late, late), 30.0) == 3
    assert autoscaler.decide(pool(late, late, late), 100.0) == 5


def test_replicas_that_are_starting_count() -> None:
    autoscaler = scaler()
    full = replace(IDLE, running=100)
    assert autoscaler.decide(pool(full), 0.0) == 2
    assert [autoscaler.decide(pool(full, target=2), now) for now in (1.0, 20.0, 60.0)] == [2, 2, 2]


def test_a_pool_shrinks_step_by_step_after_its_load_has_been_low_for_a_while() -> None:
    autoscaler, size, sizes = scaler(least=2), 10, []
    for now in range(0, 1200, 10):
        size = autoscaler.decide(pool(*[IDLE] * size), float(now))
        sizes.append(size)
    assert sizes[:10] == [10] * 10
    assert sizes[10] == 9
    assert all(0 <= before - after <= 1 for before, after in pairwise(sizes))
    assert sizes[-1] == 2


def test_a_short_burst_keeps_a_pool_from_shrinking() -> None:
    autoscaler = scaler()
    for now in range(0, 1000, 10):
        signals = replace(IDLE, running=70) if now % 90 == 0 else IDLE
        assert autoscaler.decide(pool(signals, signals), float(now)) == 2


def test_a_pool_does_not_shrink_to_where_it_would_grow_again() -> None:
    autoscaler = scaler()
    signals = replace(IDLE, running=40)  # 120 in all: two replicas would have nearly all they should
    assert [autoscaler.decide(pool(signals, signals, signals), now) for now in (0.0, 200.0, 400.0)] == [3, 3, 3]


def test_nothing_shrinks_while_a_replica_is_silent_or_starting() -> None:
    autoscaler = scaler(delay_s=0.0)
    silent = PoolState(target=2, ready=2, open_requests=0, signals=[IDLE])
    assert [autoscaler.decide(state, 1000.0) for state in (silent, pool(IDLE, target=2))] == [2, 2]


def test_the_last_replica_stops_when_nothing_is_open_and_the_next_request_starts_one() -> None:
    autoscaler = scaler(least=0, delay_s=30.0)
    assert [autoscaler.decide(pool(IDLE), now) for now in (0.0, 29.0)] == [1, 1]
    assert autoscaler.decide(pool(IDLE, open_requests=1), 29.5) == 1
    assert [autoscaler.decide(pool(IDLE), now) for now in (30.0, 59.0, 60.0)] == [1, 1, 0]
    assert [autoscaler.decide(pool(open_requests=n), 70.0) for n in (0, 1)] == [0, 1]


def test_one_replica_stays_unless_none_is_allowed() -> None:
    assert scaler(delay_s=0.0).decide(pool(IDLE), 1000.0) == 1


def test_an_engine_s_counters_are_looked_at_over_a_window() -> None:
    config = EngineConfig.from_args({"backend": "mock", "slo_ttft_ms": 100})
    metrics = EngineMetrics(slo_ttft_ms=config.slo_ttft_ms)
    window = SignalWindow(
        Limits(step_tokens=7, running=5, live=9, prefill_rows=1, chunked=True, mixed=True, caching=True)
    )
    seen = []
    for second in range(120):
        metrics.time_to_first_token_seconds.observe(0.05 if second < 60 else 0.5)
        metrics.num_requests_running = second
        seen.append(window.signals(metrics.snapshot(), float(second)))
    assert (seen[10].first_tokens, seen[10].first_tokens_in_time) == (10, 10)
    assert (seen[-1].first_tokens, seen[-1].first_tokens_in_time) == (WINDOW_S, 0)
    assert (seen[-1].running, seen[-1].slots, seen[-1].step_tokens) == (119, 5, 7)


def test_what_serve_is_told_makes_the_policy() -> None:
    config = EngineConfig.from_args({"backend": "mock", "max_replicas": 4, "min_replicas": 0, "downscale_delay_s": 7})
    options = serve_options(config, Role.DECODE, 2)
    assert options is not None
    assert (options["min_replicas"], options["initial_replicas"], options["max_replicas"]) == (0, 2, 4)
    ServePolicy(**options["policy"]["policy_kwargs"])
    assert serve_options(EngineConfig.from_args({"backend": "mock"}), Role.UNIFIED, 1) is None


def test_pools_have_bounds_of_their_own() -> None:
    bounds = {"disagg_topo": "1,2", "min_replicas": 2, "max_replicas": 5, "prefill_max_replicas": 3}
    config = EngineConfig.from_args({"backend": "mock", **bounds})
    assert scaling_options(config, Role.DECODE) == ScalingOptions(role=Role.DECODE, min_replicas=2, max_replicas=5)
    prefill = scaling_options(prefill_config(config), Role.PREFILL)
    assert prefill == ScalingOptions(role=Role.PREFILL, min_replicas=1, max_replicas=3)
    fixed = EngineConfig.from_args({"backend": "mock", "disagg_topo": "1,2", "max_replicas": 5})
    assert scaling_options(prefill_config(fixed), Role.PREFILL) is None


def test_the_application_s_pools_scale_each_by_its_own_signals() -> None:
    bounds = {"max_replicas": 5, "min_replicas": 0, "prefill_max_replicas": 3, "prefill_min_replicas": 2}
    ingress: Any = build_app({"backend": "mock", "disagg_topo": "1,2", **bounds})
    engine = ingress._bound_deployment.init_args[1]
    prefill = engine._bound_deployment.init_args[2]
    seen = {}
    for one in (prefill, engine):
        scaling = one._bound_deployment._deployment_config.autoscaling_config
        role = scaling.policy.policy_kwargs["role"]
        seen[role] = (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas)
    assert seen == {"prefill": (2, 2, 3), "decode": (0, 2, 5)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_replicas": 2}, "min_replicas=2 needs max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 is more than max_replicas=2"),
        ({"prefill_max_replicas": 2}, "prefill_max_replicas=2 needs disagg_topo"),
        ({"data_parallel_size": 4, "max_replicas": 2}, "data_parallel_size=4 starts 4 replicas, more than max_"),
        ({"disagg_topo": "1,3", "max_replicas": 2}, "disagg_topo=1,3 starts 3 replicas, more than max_replicas=2"),
        ({"disagg_topo": "3,1", "prefill_max_replicas": 2}, "starts 3 replicas, more than prefill_max_replicas=2"),
    ],
)
def test_replicas_that_can_t_be_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_args({"backend": "mock", **options})


# -- on Serve


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    options = {
        "data_parallel_size": "2",
        "min_replicas": "0",
        "max_replicas": "2",
        "downscale_delay_s": "1",
        "mock_step_ms": "20",
        "routing_policy": "round_robin",
    }
    with deployed(serve_url, "scaling", **options) as address:
        yield address


def replicas() -> dict[str, int]:
    """Engine replicas by state."""
    deployment = serve.status().applications["scaling"].deployments["Engine"]
    return {str(state): count for state, count in deployment.replica_states.items()}


def test_no_stream_is_lost_when_replicas_stop_down_to_none_and_the_next_request_starts_one(url: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(completion, url, prompt=f"stream {n}", max_tokens=200) for n in range(8)]
        eventually(lambda: sum(metric(url, "vllm:num_requests_running").values()) == 8)
        eventually(lambda: replicas().get("STOPPING") == 1)
        answers = [stream.result(timeout=60).json() for stream in streams]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [200] * 8
    assert sum(metric(url, "sliceserve_resumptions_total").values()) == 0
    eventually(lambda: not replicas(), 30.0)
    assert httpx.get(f"{url}/health", timeout=15).json()["status"] == "degraded"
    began = time.monotonic()
    answer = completion(url, prompt="good morning", max_tokens=3)
    assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
    assert time.monotonic() - began > 0.5
    assert replicas()["RUNNING"] == 1
