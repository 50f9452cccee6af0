"""An engine server's metrics through Ray's metrics agent, so that Ray's dashboard and its stock LLM panels show them.

Ray drops names with a colon silently, so vLLM's names come with an underscore here (`ray_vllm_num_requests_running`),
which is what Ray's panels ask for. Ray has no histogram that takes counts; a histogram is exported as the series that
Prometheus itself would make of it (`_bucket`, `_sum`, `_count`), which is exact and costs the same at any token rate.
"""

from __future__ import annotations

from collections import defaultdict

from ray.util.metrics import Counter, Gauge

from cluster.metrics_text import cumulative, exported_name
from cluster.replica_metrics import REPLICA_DEFINITIONS, has
from engine.metrics import MetricDefinition, MetricsSnapshot

EXPORT_INTERVAL_S = 2.0


class RayMetricsExporter:
    """Feeds Ray's metrics from snapshots. One per process."""

    def __init__(self, tags: dict[str, str]) -> None:
        """`tags` are on every series (model_name, application, replica, role)."""
        self._tags = tags
        self._exported: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        for definition in REPLICA_DEFINITIONS:
            self._create(definition)

    def export(self, snapshot: MetricsSnapshot) -> None:
        for definition in REPLICA_DEFINITIONS:
            name = definition.name
            if not has(snapshot, definition):
                continue
            if definition.kind == "histogram":
                self._export_histogram(definition, snapshot)
            elif definition.kind == "gauge":
                self._gauges[name].set(snapshot.values[name], tags=self._tags)
            elif definition.label is not None:
                for value, count in snapshot.labelled[name].items():
                    self._count_up(name, count, {definition.label: value})
            else:
                self._count_up(name, snapshot.values[name], {})

    def _create(self, definition: MetricDefinition) -> None:
        name = exported_name(definition).replace(":", "_")
        keys = tuple(self._tags)
        if definition.kind == "counter":
            labels = (definition.label,) if definition.label else ()
            self._counters[definition.name] = Counter(name, description=definition.help, tag_keys=keys + labels)
        elif definition.kind == "gauge":
            self._gauges[definition.name] = Gauge(name, description=definition.help, tag_keys=keys)
        else:
            for suffix, labels in (("_bucket", ("le",)), ("_sum", ()), ("_count", ())):
                gauge = Gauge(name + suffix, description=definition.help, tag_keys=keys + labels)
                self._gauges[definition.name + suffix] = gauge

    def _export_histogram(self, definition: MetricDefinition, snapshot: MetricsSnapshot) -> None:
        histogram = snapshot.histograms[definition.name]
        buckets = cumulative(definition, histogram)
        for bound, count in buckets:
            self._gauges[definition.name + "_bucket"].set(count, tags={**self._tags, "le": bound})
        self._gauges[definition.name + "_sum"].set(histogram.sum, tags=self._tags)
        self._gauges[definition.name + "_count"].set(buckets[-1][1], tags=self._tags)

    def _count_up(self, name: str, count: float, labels: dict[str, str]) -> None:
        key = (name, "".join(labels.values()))
        grown = count - self._exported[key]
        if grown > 0:
            self._exported[key] = count
            self._counters[name].inc(grown, tags={**self._tags, **labels})
