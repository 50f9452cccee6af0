"""Which deployment serves a workload best: slices, quantization, parallelism, disaggregation and replicas, ranked.

All combinations are estimated by formula, which takes a second or two; the caller may compile the best ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cluster.plan.errors import PlanError
from cluster.plan.planner import Plan, make_plan
from cluster.plan.prices import Prices
from cluster.plan.request import PlanRequest
from cluster.plan.sizing import usable_tensor_parallel
from cluster.plan.workload import Slo
from cluster.topology import TpuSlice

Rank = Literal["cost", "throughput"]

_DISAGGREGATIONS = ((0, 0), (1, 1), (1, 2), (2, 1), (1, 3), (3, 1))
_REPLICAS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """`replicas` deployments like the plan's, each with its share of the workload."""

    plan: Plan
    replicas: int

    @property
    def chips(self) -> int:
        topology = self.plan.request.topology
        assert isinstance(topology, TpuSlice)
        return topology.num_chips * self.plan.request.num_slices * self.replicas

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.plan.usd_per_hour is None else self.plan.usd_per_hour * self.replicas

    @property
    def usd_per_million(self) -> float | None:
        """Expected."""
        assert self.plan.performance is not None
        return self.plan.usd_per_million(self.plan.performance.expected)

    @property
    def output_tokens_per_s(self) -> float:
        """Expected, of all replicas."""
        assert self.plan.performance is not None
        return self.plan.performance.expected.output_tokens_per_s * self.replicas

    def meets(self, slo: Slo) -> bool:
        assert self.plan.performance is not None
        expected = self.plan.performance.expected
        return slo.met_by(expected.ttft_s, expected.tpot_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What may be varied. The request holds what is fixed, and the whole workload."""

    request: PlanRequest
    slices: tuple[TpuSlice, ...]
    quantizations: tuple[str | None, ...]
    max_chips: int  # of the whole deployment


def search(space: SearchSpace, slo: Slo, prices: Prices, rank: Rank) -> list[Candidate]:
    """The best candidates first, one for each slice, quantization and way of serving.

    Raises:
        PlanError: nothing fits, or nothing keeps the SLO; says how near it comes.
    """
    candidates = list(_candidates(space, prices))
    if not candidates:
        raise PlanError(
            f"{space.request.model_name} fits on none of {len(space.slices)} slices with {space.max_chips} chips or "
            "fewer; raise --max_chips, lower --max_model_len, or allow other topologies"
        )
    keeping = [candidate for candidate in candidates if candidate.meets(slo)]
    if not keeping:
        raise PlanError(_nearest(candidates, slo))
    return ranked(_best_of_kind(keeping, rank), rank)


def ranked(candidates: Iterable[Candidate], rank: Rank) -> list[Candidate]:
    """By cost per token (unknown prices last), or by tokens a second; then by fewer chips."""
    return sorted(candidates, key=lambda candidate: _key(candidate, rank))


def _key(candidate: Candidate, rank: Rank) -> tuple[float, int]:
    if rank == "throughput":
        return -candidate.output_tokens_per_s, candidate.chips
    cost = candidate.usd_per_million
    return float("inf") if cost is None else cost, candidate.chips


def _best_of_kind(candidates: Iterable[Candidate], rank: Rank) -> Iterable[Candidate]:
    best: dict[tuple[str, str | None, bool], Candidate] = {}
    for candidate in ranked(candidates, rank):
        request = candidate.plan.request
        best.setdefault((request.topology.name, request.quantization, bool(request.prefill_slices)), candidate)
    return best.values()


def _candidates(space: SearchSpace, prices: Prices) -> Iterator[Candidate]:
    for request in _requests(space):
        for replicas in _REPLICAS:
            workload = space.request.workload
            if replicas > workload.concurrency:
                break
            share = replace(workload, concurrency=-(-workload.concurrency // replicas))
            candidate = Candidate(plan=make_plan(replace(request, workload=share), prices), replicas=replicas)
            if candidate.plan.performance is None or candidate.chips > space.max_chips:
                break
            yield candidate


def _requests(space: SearchSpace) -> Iterator[PlanRequest]:
    for chosen in space.slices:
        for tensor_parallel in usable_tensor_parallel(space.request.model, chosen.num_devices):
            for quantization in space.quantizations:
                for prefill, decode in _DISAGGREGATIONS:
                    yield replace(
                        space.request,
                        topology=chosen,
                        tensor_parallel=tensor_parallel,
                        data_parallel=chosen.num_devices // tensor_parallel,
                        quantization=quantization,
                        prefill_slices=prefill,
                        decode_slices=decode,
                    )


def _nearest(candidates: list[Candidate], slo: Slo) -> str:
    """What the best latencies are, where no candidate keeps all limits."""
    expectations = [c.plan.performance.expected for c in candidates if c.plan.performance is not None]
    parts = []
    if slo.ttft_s is not None:
        parts.append(f"TTFT {min(e.ttft_s for e in expectations) * 1e3:.0f} ms")
    if slo.tpot_s is not None:
        parts.append(f"TPOT {min(e.tpot_s for e in expectations) * 1e3:.1f} ms")
    return (
        f"nothing in the search is expected to keep the SLO; the least that can be had is {' and '.join(parts)}, "
        "not always together: relax --slo, lower the concurrency or raise --max_chips"
    )
