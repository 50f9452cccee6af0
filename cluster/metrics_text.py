"""The whole application's metrics in Prometheus text format.

Engine metrics that vLLM has too carry its names (`vllm:num_requests_running`, ...), so that existing dashboards and
alerts work; everything else begins with `sliceserve_`. Each series is labelled with model, application and replica;
sums over replicas are the reader's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.replica_metrics import REPLICA_DEFINITIONS, has
from engine.metrics import DEFINITIONS, HistogramSnapshot, MetricDefinition, MetricsSnapshot

VLLM_METRICS = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc"),
        *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
        "iteration_tokens_total",
    }
)
"""Metrics that vLLM has, under the same names and with the same meanings."""

LABELS = ("model_name", "application", "replica", "role")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLabels:
    model_name: str
    application: str
    replica: str
    role: str  # of cluster.roles.Role, or "ingress"

    def values(self) -> tuple[str, str, str, str]:
        return (self.model_name, self.application, self.replica, self.role)

    def as_dict(self) -> dict[str, str]:
        return dict(zip(LABELS, self.values(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """The metrics of one engine server."""

    labels: ReplicaLabels
    metrics: MetricsSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class IngressReport:
    """The metrics of one ingress."""

    labels: ReplicaLabels
    responses: Mapping[tuple[str, str], int]  # (route, status code) -> HTTP responses
    open_requests: int
    resumptions: Mapping[str, int] = field(default_factory=dict)  # by what became of a request whose engine was lost


def render(engines: Sequence[EngineReport], ingresses: Sequence[IngressReport]) -> bytes:
    """Prometheus text of all replicas."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reports(engines, ingresses))
    return generate_latest(registry)


def exported_name(definition: MetricDefinition) -> str:
    return ("vllm:" if definition.name in VLLM_METRICS else "sliceserve_") + definition.name


def cumulative(definition: MetricDefinition, histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """A histogram's buckets as Prometheus wants them: (upper bound, observations up to it)."""
    bounds = [*(str(bound) for bound in definition.buckets), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


class _Reports(Collector):
    def __init__(self, engines: Sequence[EngineReport], ingresses: Sequence[IngressReport]) -> None:
        self._engines = engines
        self._ingresses = ingresses

    def collect(self) -> Iterator[Metric]:
        for definition in REPLICA_DEFINITIONS:
            reports = [report for report in self._engines if has(report.metrics, definition)]
            if reports or definition in DEFINITIONS:
                yield _engine_family(definition, reports)
        yield from _ingress_families(self._ingresses)


def _engine_family(definition: MetricDefinition, reports: Iterable[EngineReport]) -> Metric:
    name, text = exported_name(definition), definition.help
    if definition.kind == "histogram":
        family = HistogramMetricFamily(name, text, labels=LABELS)
        for report in reports:
            histogram = report.metrics.histograms[definition.name]
            family.add_metric(report.labels.values(), cumulative(definition, histogram), histogram.sum)
        return family
    if definition.label is not None:
        split = CounterMetricFamily(name, text, labels=(*LABELS, definition.label))
        for report in reports:
            for value, count in report.metrics.labelled[definition.name].items():
                split.add_metric((*report.labels.values(), value), count)
        return split
    plain = (CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily)(name, text, labels=LABELS)
    for report in reports:
        plain.add_metric(report.labels.values(), report.metrics.values[definition.name])
    return plain


def _ingress_families(reports: Iterable[IngressReport]) -> Iterator[Metric]:
    responses = CounterMetricFamily(
        "sliceserve_http_responses", "HTTP responses by route and status code.", labels=(*LABELS, "route", "code")
    )
    resumptions = CounterMetricFamily(
        "sliceserve_resumptions",
        "Requests whose engine was lost: taken over by another one, or given up.",
        labels=(*LABELS, "outcome"),
    )
    opened = GaugeMetricFamily("sliceserve_http_requests_open", "HTTP requests being answered.", labels=LABELS)
    for report in reports:
        opened.add_metric(report.labels.values(), report.open_requests)
        for (route, code), count in report.responses.items():
            responses.add_metric((*report.labels.values(), route, code), count)
        for outcome, count in report.resumptions.items():
            resumptions.add_metric((*report.labels.values(), outcome), count)
    yield responses
    yield resumptions
    yield opened
