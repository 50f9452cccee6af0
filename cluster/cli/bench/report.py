"""Numbers from records: latency statistics, throughput, goodput; as a table and as JSON."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cluster.cli.bench.driver import LevelResult, RequestRecord
from cluster.latencies import Statistics, align

METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Service level objective: the most a good request may take, in milliseconds by metric (ttft, tpot, e2e)."""

    limits_ms: dict[str, float]

    def is_met(self, record: RequestRecord) -> bool:
        return all(1e3 * getattr(record, metric) <= limit for metric, limit in self.limits_ms.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelReport:
    """What one load level measured. Rates are per second over the whole level, ramp-up and tail included."""

    level: str
    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Statistics
    tpot: Statistics
    itl: Statistics
    e2e: Statistics
    goodput_per_s: float | None
    good_share: float | None
    client_cpu: float

    def to_json(self) -> dict[str, object]:
        """Plain dicts and numbers; a statistic of nothing is null."""
        return asdict(self) | {metric: getattr(self, metric).to_json() for metric in METRICS}


def summarize(result: LevelResult, objective: Objective | None) -> LevelReport:
    """Boils a level's records down to a report."""
    done = [record for record in result.records if record.error is None]
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    good = None if objective is None else sum(objective.is_met(record) for record in done)
    seconds = result.duration
    return LevelReport(
        level=result.level.name,
        requests=len(result.records),
        failed=len(result.records) - len(done),
        errors=dict(Counter(record.error for record in result.records if record.error is not None)),
        duration_s=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        ttft=Statistics.of([record.ttft for record in done]),
        tpot=Statistics.of([record.tpot for record in done if record.output_tokens > 1]),
        itl=Statistics.of(list(itertools.chain.from_iterable(record.gaps for record in done))),
        e2e=Statistics.of([record.e2e for record in done]),
        goodput_per_s=None if good is None else good / seconds,
        good_share=None if good is None else good / len(result.records),
        client_cpu=result.client_cpu,
    )


def table(reports: Sequence[LevelReport], *, by_rate: bool) -> str:
    """All levels as text: throughput first, latencies below."""
    load = "rate" if by_rate else "concurrent"
    has_goodput = reports[0].goodput_per_s is not None
    throughput = [
        [load, "requests", "failed", "in tok", "cached", "out tok", "req/s", "out tok/s", "all tok/s", "client CPU"]
    ]
    throughput[0] += ["goodput/s", "good"] if has_goodput else []
    for report in reports:
        row = [report.level, str(report.requests), str(report.failed)]
        row += [str(report.prompt_tokens), str(report.cached_tokens), str(report.output_tokens)]
        row += [f"{report.requests_per_s:.2f}", f"{report.output_tokens_per_s:.1f}", f"{report.total_tokens_per_s:.1f}"]
        row.append(f"{100 * report.client_cpu:.1f} %")
        if report.goodput_per_s is not None and report.good_share is not None:
            row += [f"{report.goodput_per_s:.2f}", f"{100 * report.good_share:.0f} %"]
        throughput.append(row)
    latency = [[load, "ms", "mean", "p50", "p95", "p99"]]
    for report in reports:
        for index, metric in enumerate(METRICS):
            label = report.level if index == 0 else ""
            latency.append([label, metric.upper(), *getattr(report, metric).cells()])
    return f"{align(throughput)}\n\n{align(latency)}"
