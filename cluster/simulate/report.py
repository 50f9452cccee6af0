"""What came out of simulations: latencies, throughput, goodput and use of the replicas, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cluster.latencies import Statistics, align
from cluster.plan.workload import Slo
from cluster.simulate.replicas import Pool, Replica
from cluster.simulate.simulation import RequestRecord, Simulation
from cluster.simulate.timeline import START

LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """One pool's replicas over the whole run."""

    name: str
    replicas_mean: float  # that hold devices, starting and draining ones included
    replicas_most: int
    replica_hours: float
    utilization: float  # share of the time of ready replicas in which their devices compute
    load_max_over_mean: float  # tokens computed per second of a replica's life
    load_max_over_min: float | None  # None: one computed nothing
    prefix_hit_rate: float  # of prompt tokens that were looked up
    preemptions: int
    failures: int
    resumed: int  # requests that went on elsewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One policy's results. Latencies in milliseconds; rates per second of virtual time, from first request to end."""

    policy: str
    requests: int
    refused: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int  # of them, at the replica that answered
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None  # requests within the SLO
    good_share: float | None
    ttft: Statistics
    tpot: Statistics
    e2e: Statistics
    pools: tuple[PoolReport, ...]

    def to_json(self) -> dict[str, object]:
        """Plain dicts and numbers; a statistic of nothing is null."""
        return asdict(self) | {name: getattr(self, name).to_json() for name in LATENCIES}


def summarize(policy: str, simulation: Simulation, pools: Sequence[Pool], slo: Slo | None) -> Report:
    """Boils a finished simulation down to a report."""
    records = simulation.records
    done = [record for record in records if record.is_done]
    end = max((record.last_token_at for record in done), default=START)
    duration_s = max(end - min((record.arrived_at for record in records), default=START), 1e-9)
    good = None if slo is None else sum(_is_good(record, slo) for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    return Report(
        policy=policy,
        requests=len(records),
        refused=sum(record.is_refused for record in records),
        duration_s=duration_s,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        goodput_per_s=None if good is None else good / duration_s,
        good_share=None if good is None else good / max(1, len(records)),
        ttft=Statistics.of([record.ttft_s for record in done]),
        tpot=Statistics.of([record.tpot_s for record in done if record.output_tokens > 1]),
        e2e=Statistics.of([record.e2e_s for record in done]),
        pools=tuple(_pool_report(pool, end) for pool in pools),
    )


def _is_good(record: RequestRecord, slo: Slo) -> bool:
    return slo.met_by(record.ttft_s, record.tpot_s)


def _pool_report(pool: Pool, end: float) -> PoolReport:
    replicas = pool.replicas
    up_s = [replica.seconds_up(end) for replica in replicas]
    rates = [replica.engine.num_tokens / up for replica, up in zip(replicas, up_s, strict=True) if up > 0]
    mean_rate = sum(rates) / max(1, len(rates))
    metrics = [replica.engine.metrics for replica in replicas]
    queries = sum(one.prefix_cache_queries for one in metrics)
    paid_s = sum(replica.seconds_paid(end) for replica in replicas)
    return PoolReport(
        name=pool.name,
        replicas_mean=paid_s / max(end - START, 1e-9),
        replicas_most=_most_at_once(replicas),
        replica_hours=paid_s / 3600,
        utilization=sum(replica.engine.busy_s for replica in replicas) / max(sum(up_s), 1e-9),
        load_max_over_mean=max(rates, default=0.0) / max(mean_rate, 1e-9),
        load_max_over_min=max(rates) / least if (least := min(rates, default=0.0)) else None,
        prefix_hit_rate=sum(one.prefix_cache_hits for one in metrics) / max(1, queries),
        preemptions=sum(one.num_preemptions for one in metrics),
        failures=pool.num_failures,
        resumed=pool.num_resumed,
    )


def _most_at_once(replicas: Sequence[Replica]) -> int:
    changes = sorted(
        [(replica.began_at, 1) for replica in replicas]
        + [(replica.gone_at, -1) for replica in replicas if replica.gone_at]
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def tables(reports: Sequence[Report]) -> str:
    """All policies as text: throughput, latencies, and the pools of replicas."""
    return "\n\n".join(map(align, (_throughput(reports), _latencies(reports), _pools(reports))))


def _throughput(reports: Sequence[Report]) -> list[list[str]]:
    with_slo = reports[0].goodput_per_s is not None
    rows = [["policy", "requests", "refused", "seconds", "in tok", "cached", "out tok", "req/s", "out tok/s"]]
    rows[0] += ["goodput/s", "good"] if with_slo else []
    for report in reports:
        row = [report.policy, str(report.requests), str(report.refused), f"{report.duration_s:.1f}"]
        row += [str(report.prompt_tokens), str(report.cached_tokens), str(report.output_tokens)]
        row += [f"{report.requests_per_s:.2f}", f"{report.output_tokens_per_s:.1f}"]
        if report.goodput_per_s is not None and report.good_share is not None:
            row += [f"{report.goodput_per_s:.2f}", f"{100 * report.good_share:.1f} %"]
        rows.append(row)
    return rows


def _latencies(reports: Sequence[Report]) -> list[list[str]]:
    rows = [["policy", "ms", "mean", "p50", "p95", "p99"]]
    for report in reports:
        for name in LATENCIES:
            label = report.policy if name == LATENCIES[0] else ""
            rows.append([label, name.upper(), *getattr(report, name).cells()])
    return rows


def _pools(reports: Sequence[Report]) -> list[list[str]]:
    rows = [["policy", "pool", "replicas", "most", "hours", "busy", "max/mean", "max/min", "hits", "preempted"]]
    failing = any(pool.failures for report in reports for pool in report.pools)
    rows[0] += ["failures", "resumed"] if failing else []
    for report in reports:
        for pool in report.pools:
            row = [report.policy, pool.name, f"{pool.replicas_mean:.1f}", str(pool.replicas_most)]
            row += [f"{pool.replica_hours:.2f}", f"{100 * pool.utilization:.1f} %", f"{pool.load_max_over_mean:.2f}"]
            row.append("-" if pool.load_max_over_min is None else f"{pool.load_max_over_min:.2f}")
            row += [f"{100 * pool.prefix_hit_rate:.1f} %", str(pool.preemptions)]
            row += [str(pool.failures), str(pool.resumed)] if failing else []
            rows.append(row)
    return rows
