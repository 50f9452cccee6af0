"""Metrics of several replicas as one Prometheus page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics_text import VLLM_METRICS, EngineReport, IngressReport, ReplicaLabels, render
from engine.metrics import DEFINITIONS, EngineMetrics


def labels(replica: str) -> ReplicaLabels:
    return ReplicaLabels(model_name="tiny", application="app", replica=replica, role="unified")


def engine(replica: str, *, tokens: int, ttfts: list[float]) -> EngineReport:
    metrics = EngineMetrics()
    metrics.generation_tokens = tokens
    for ttft in ttfts:
        metrics.time_to_first_token_seconds.observe(ttft)
    return EngineReport(labels=labels(replica), metrics=metrics.snapshot())


def samples(page: bytes) -> dict[tuple[str, str, str], float]:
    """(name, replica, the sample's own label) -> value"""
    return {
        (
            sample.name,
            sample.labels["replica"],
            sample.labels.get("le") or sample.labels.get("code") or "",
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_every_replica_has_its_own_series() -> None:
    found = samples(render([engine("a", tokens=5, ttfts=[]), engine("b", tokens=7, ttfts=[])], []))
    assert found["vllm:generation_tokens_total", "a", ""] == 5
    assert found["vllm:generation_tokens_total", "b", ""] == 7


def test_histograms_are_cumulative_and_agree_with_their_count() -> None:
    found = samples(render([engine("a", tokens=0, ttfts=[0.002, 0.003, 0.03, 9999.0])], []))
    assert found["vllm:time_to_first_token_seconds_bucket", "a", "0.005"] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", "a", "0.04"] == 3
    assert found["vllm:time_to_first_token_seconds_bucket", "a", "+Inf"] == 4
    assert found["vllm:time_to_first_token_seconds_count", "a", ""] == 4
    assert found["vllm:time_to_first_token_seconds_sum", "a", ""] == 9999.035


def test_everything_that_the_engine_defines_is_exported() -> None:
    families = text_string_to_metric_families(render([engine("a", tokens=1, ttfts=[])], []).decode())
    names = {family.name.removeprefix("vllm:").removeprefix("sliceserve_") for family in families}
    assert {definition.name for definition in DEFINITIONS} <= names


def test_only_what_vllm_has_is_exported_under_its_name() -> None:
    families = text_string_to_metric_families(render([engine("a", tokens=1, ttfts=[])], []).decode())
    names = {family.name for family in families}
    assert {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")} == VLLM_METRICS
    assert {"sliceserve_num_tokens_waiting", "sliceserve_kv_imported_tokens", "sliceserve_tokens_in_slo"} <= names


def test_ingresses_report_responses_by_route_and_code() -> None:
    report = IngressReport(labels=labels("i"), responses={("/v1/models", "200"): 3}, open_requests=2)
    found = samples(render([], [report]))
    assert found["sliceserve_http_responses_total", "i", "200"] == 3
    assert found["sliceserve_http_requests_open", "i", ""] == 2
