"""What the engine measures, by name, and the plain-Python record of it.

`DEFINITIONS` is the one table of metrics: exporters (prometheus-client, ray.util.metrics) are built from it and add
their own prefix and the `_total` of counters. Names and meanings are vLLM's where vLLM has the metric. The record is
written by the engine's thread only and read by `snapshot` from any thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.request import FinishReason

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_LENGTH_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""1 to 500,000 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDefinition:
    name: str  # without prefix, and without the _total that exporters append to counters
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, +Inf left out
    label: str | None = None  # the one label that splits it, if any


def gauge(name: str, text: str) -> MetricDefinition:
    return MetricDefinition(name=name, kind="gauge", help=text)


def counter(name: str, text: str, label: str | None = None) -> MetricDefinition:
    return MetricDefinition(name=name, kind="counter", help=text, label=label)


def histogram(name: str, text: str, buckets: tuple[float, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind="histogram", help=text, buckets=buckets)


DEFINITIONS: tuple[MetricDefinition, ...] = (
    gauge("num_requests_running", "Requests that have a place in the batch."),
    gauge("num_requests_waiting", "Requests that wait for a place in the batch."),
    gauge("num_tokens_waiting", "Tokens of requests that are still to be computed before their first new one."),
    gauge("kv_cache_usage_perc", "Share of the KV cache blocks that running requests own; 1 means all."),
    counter("num_preemptions", "Times a running request lost its KV blocks and had to be recomputed."),
    counter("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    counter("prefix_cache_hits", "Tokens found in the prefix cache."),
    counter("kv_imported_tokens", "Tokens whose KV came from another engine or from the prefix store."),
    counter("kv_import_failures", "Times KV that was to come from elsewhere did not, and was computed here."),
    counter("kv_exported_tokens", "Tokens whose KV was handed out to another engine."),
    counter("prompt_tokens", "Prompt tokens of requests whose prefill is done."),
    counter("generation_tokens", "Tokens generated."),
    counter("request_success", "Requests that ended, by reason.", label="finished_reason"),
    counter("first_tokens_in_slo", "First tokens that came within slo_ttft_ms; all, where there is no limit."),
    counter("tokens_in_slo", "Tokens that came within slo_tpot_ms of the one before; all, where there is no limit."),
    counter("compilations_after_warmup", "Programs compiled while serving; anything but 0 is a bug."),
    histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS),
    histogram("inter_token_latency_seconds", "Between two tokens of a request.", _ITL_BUCKETS),
    histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_BUCKETS),
    histogram("request_queue_time_seconds", "From a request's arrival to its place in the batch.", _REQUEST_BUCKETS),
    histogram(
        "request_prefill_time_seconds", "From a request's place in the batch to its first token.", _REQUEST_BUCKETS
    ),
    histogram("request_decode_time_seconds", "From a request's first token to its last one.", _REQUEST_BUCKETS),
    histogram(
        "request_time_per_output_token_seconds", "Mean time per token of a request after its first one.", _ITL_BUCKETS
    ),
    histogram("request_prompt_tokens", "Prompt tokens per request.", _LENGTH_BUCKETS),
    histogram("request_generation_tokens", "Tokens generated per request.", _LENGTH_BUCKETS),
    histogram("iteration_tokens_total", "Tokens per engine step, prefill and decode.", _TOKEN_BUCKETS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramSnapshot:
    counts: tuple[int, ...]  # per bucket, not cumulative; the last one is above every bound
    sum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSnapshot:
    """The state of every metric at one time; picklable."""

    values: Mapping[str, float]  # gauges and counters without label, by name
    labelled: Mapping[str, Mapping[str, float]]  # counters with a label: name -> label value -> count
    histograms: Mapping[str, HistogramSnapshot]


class Histogram:
    """Counts of observations per bucket."""

    __slots__ = ("_bounds", "_counts", "_limit", "_sum", "within")

    def __init__(self, bounds: tuple[float, ...], limit: float = math.inf) -> None:
        """`limit`: an objective; `within` is the number of observations that meet it."""
        self._bounds = bounds
        self._limit = limit
        self.within = 0
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        if value <= self._limit:
            self.within += times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(counts=tuple(self._counts), sum=self._sum)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """What metrics must know of a request that has ended. Times in seconds since the epoch, 0 where there is none."""

    prompt_tokens: int
    generated_tokens: int  # here; none that another replica had generated
    arrival_time: float
    admission_time: float  # its first place in the batch
    first_token_time: float
    last_token_time: float


class EngineMetrics:
    """The engine's record, one attribute per metric."""

    def __init__(self, *, slo_ttft_ms: float | None = None, slo_tpot_ms: float | None = None) -> None:
        self.num_requests_running = 0
        self.num_requests_waiting = 0
        self.num_tokens_waiting = 0
        self.kv_cache_usage_perc = 0.0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.kv_imported_tokens = 0
        self.kv_import_failures = 0
        self.kv_exported_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.compilations_after_warmup = 0
        self.request_success = dict.fromkeys(FinishReason, 0)
        limits = {"time_to_first_token_seconds": slo_ttft_ms, "inter_token_latency_seconds": slo_tpot_ms}
        histograms = {
            item.name: Histogram(item.buckets, math.inf if (limit := limits.get(item.name)) is None else limit / 1000)
            for item in DEFINITIONS
            if item.kind == "histogram"
        }
        self._histograms = histograms
        self.time_to_first_token_seconds = histograms["time_to_first_token_seconds"]
        self.inter_token_latency_seconds = histograms["inter_token_latency_seconds"]
        self.e2e_request_latency_seconds = histograms["e2e_request_latency_seconds"]
        self.request_queue_time_seconds = histograms["request_queue_time_seconds"]
        self.iteration_tokens_total = histograms["iteration_tokens_total"]

    @property
    def first_tokens_in_slo(self) -> int:
        return self.time_to_first_token_seconds.within

    @property
    def tokens_in_slo(self) -> int:
        return self.inter_token_latency_seconds.within

    def request_ended(self, record: RequestRecord, reason: FinishReason, now: float) -> None:
        """Counts a request that got its last output at `now` (seconds since the epoch)."""
        self.request_success[reason] += 1
        histograms = self._histograms
        self.e2e_request_latency_seconds.observe(now - record.arrival_time)
        histograms["request_prompt_tokens"].observe(record.prompt_tokens)
        histograms["request_generation_tokens"].observe(record.generated_tokens)
        if not record.first_token_time:
            return
        histograms["request_prefill_time_seconds"].observe(record.first_token_time - record.admission_time)
        decode_s = record.last_token_time - record.first_token_time
        histograms["request_decode_time_seconds"].observe(decode_s)
        if record.generated_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode_s / (record.generated_tokens - 1))

    def snapshot(self) -> MetricsSnapshot:
        plain = (item.name for item in DEFINITIONS if item.kind != "histogram" and item.label is None)
        return MetricsSnapshot(
            values={name: float(getattr(self, name)) for name in plain},
            labelled={"request_success": {reason.value: float(n) for reason, n in self.request_success.items()}},
            histograms={name: histogram.snapshot() for name, histogram in self._histograms.items()},
        )
