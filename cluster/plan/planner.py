"""From a request to a plan: memory, capacity, roofline, performance and cost of one deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.plan.advice import what_would_fit
from cluster.plan.calibration import EXPECTED
from cluster.plan.costs import StepCost, StepCosts
from cluster.plan.errors import PlanError
from cluster.plan.estimate import Group, Performance, disaggregated, unified
from cluster.plan.fitting import memory_of
from cluster.plan.memory import MemoryPlan
from cluster.plan.prices import Prices
from cluster.plan.programs import Programs, formula_programs
from cluster.plan.request import PlanRequest, check_context
from cluster.plan.roofline import Efficiency, Peaks, StepTime, step_time
from cluster.topology import NeuronInstance, TpuSlice
from engine.config import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step on one device: what it does, and the time each resource is busy with it."""

    tokens: int
    rows: int
    context: float  # keys that a token sees, on average
    cost: StepCost
    minimum: StepCost  # by formula; a compiled program does more
    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformancePlan:
    """TPU slices only."""

    peaks: Peaks
    decode: StepReport
    prefill: StepReport
    bound: Performance
    expected: Performance


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer to a request."""

    request: PlanRequest
    programs: Programs
    memory: MemoryPlan
    performance: PerformancePlan | None  # None: memory only, or nothing fits
    usd_per_hour: float | None

    def usd_per_million(self, performance: Performance) -> float | None:
        """Dollars per million output tokens; the prompts of the workload are paid with them."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour / 3600 / performance.output_tokens_per_s * 1e6


def make_plan(request: PlanRequest, prices: Prices, programs: Programs | None = None) -> Plan:
    """Plans a deployment, whether it fits or not; by formula unless measured `programs` are given.

    Raises:
        PlanError: the request contradicts itself.
    """
    check_context(request)
    programs = programs or formula_programs(request)
    memory = memory_of(request, programs)
    price = prices.of(request.topology)
    plan = Plan(
        request=request,
        programs=programs,
        memory=memory,
        performance=None,
        usd_per_hour=None if price is None else price * request.num_slices,
    )
    if not memory.fits or isinstance(request.topology, NeuronInstance):
        return plan
    return replace(plan, performance=_performance(request, request.topology, programs, memory))


def check_fits(plan: Plan) -> None:
    """Raises:
    PlanError: the deployment does not fit; says what would.
    """
    if plan.memory.fits:
        return
    request, memory = plan.request, plan.memory
    need = memory.weight_bytes + memory.other_bytes + memory.temporary_bytes
    raise PlanError(
        f"{request.model_name} does not fit on {request.topology.name}: weights, tables and temporaries take "
        f"{need / GIB:.1f} GiB of each device's {memory.budget_bytes / GIB:.1f} GiB, and one sequence of "
        f"{memory.max_model_len} tokens {_sequence_gib(memory):.1f} GiB more; {what_would_fit(request)}"
    )


def group_of(request: PlanRequest, chosen: TpuSlice, programs: Programs, memory: MemoryPlan) -> Group:
    return Group(
        costs=programs.costs,
        peaks=Peaks.of(chosen),
        step_tokens=request.step_tokens,
        kv_tokens=memory.kv_tokens,
        max_rows=request.max_rows,
    )


def performance_under(request: PlanRequest, group: Group, efficiency: Efficiency | None) -> Performance:
    """Bound (without an efficiency) or expectation of a request's deployment."""
    if not request.prefill_slices:
        return unified(group, request.workload, request.data_parallel, efficiency)
    prefill, decode = (slices * request.data_parallel for slices in (request.prefill_slices, request.decode_slices))
    return disaggregated(group, request.workload, prefill, decode, efficiency)


def _performance(request: PlanRequest, chosen: TpuSlice, programs: Programs, memory: MemoryPlan) -> PerformancePlan:
    group = group_of(request, chosen, programs, memory)
    bound = performance_under(request, group, None)
    return PerformancePlan(
        peaks=group.peaks,
        decode=_decode_report(request, group, bound.running),
        prefill=_prefill_report(request, group),
        bound=bound,
        expected=performance_under(request, group, EXPECTED),
    )


def _decode_report(request: PlanRequest, group: Group, rows: int) -> StepReport:
    context = request.workload.mean_context

    def cost(costs: StepCosts) -> StepCost:
        return costs.decode(rows, context)

    return _step_report(request, group, cost, tokens=rows, rows=rows, context=context)


def _prefill_report(request: PlanRequest, group: Group) -> StepReport:
    """A whole step of prompt tokens, weights included."""
    tokens = min(request.step_tokens, request.workload.input_tokens)
    context = tokens / 2

    def cost(costs: StepCosts) -> StepCost:
        return costs.decode(0, 0) + costs.prefill(tokens, context)

    return _step_report(request, group, cost, tokens=tokens, rows=1, context=context)


def _step_report(
    request: PlanRequest,
    group: Group,
    cost_of: Callable[[StepCosts], StepCost],
    *,
    tokens: int,
    rows: int,
    context: float,
) -> StepReport:
    cost = cost_of(group.costs)
    minimum = cost_of(formula_programs(request).costs)
    time = step_time(cost, group.peaks)
    return StepReport(tokens=tokens, rows=rows, context=context, cost=cost, minimum=minimum, time=time)


def _sequence_gib(memory: MemoryPlan) -> float:
    return memory.max_model_len / memory.block_size * memory.kv_bytes_per_block / GIB
