"""Whether a request's deployment fits into its devices' memory."""

from __future__ import annotations

from cluster.plan.memory import MemoryPlan, plan_memory
from cluster.plan.programs import Programs, formula_programs
from cluster.plan.request import PlanRequest


def fits(request: PlanRequest) -> bool:
    """By formula."""
    return memory_of(request, formula_programs(request)).fits


def memory_of(request: PlanRequest, programs: Programs) -> MemoryPlan:
    """One device's memory under a request's options."""
    return plan_memory(
        usable_bytes=request.topology.bytes_per_device,
        factor=request.utilization,
        weight_bytes=programs.weight_bytes,
        other_bytes=programs.other_bytes,
        temporary_bytes=programs.temporary_bytes,
        kv_bytes_per_block=programs.kv_bytes_per_block,
        block_size=request.block_size,
        max_model_len=request.max_model_len,
        model_max_len=request.model.max_position,
        max_rows=request.max_rows,
        shortest=request.workload.tokens,
    )
