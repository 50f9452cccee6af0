"""What a deployment's programs take and cost on one device, wherever the numbers come from."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.plan.costs import AnalyticCosts, StepCosts
from cluster.plan.request import PlanRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Bytes are per device."""

    source: str  # "formula" | "compiled"
    weight_bytes: int
    other_bytes: int  # token history and sampling tables
    kv_bytes_per_block: int
    temporary_bytes: int  # of the program that needs most, its code included
    costs: StepCosts
    num_programs: int = 0  # compiled
    compile_seconds: float = 0.0


def formula_programs(request: PlanRequest) -> Programs:
    """Everything by formula, in no time."""
    shard = request.shard
    max_len = request.max_model_len or request.model.max_position
    return Programs(
        source="formula",
        weight_bytes=shard.weight_bytes,
        other_bytes=shard.history_bytes(request.max_rows, max_len) + shard.table_bytes(request.max_rows),
        kv_bytes_per_block=shard.kv_bytes_per_token * request.block_size,
        temporary_bytes=shard.temporary_bytes(request.step_tokens, request.max_rows),
        costs=AnalyticCosts(shard=shard, devices_per_chip=request.devices_per_chip),
    )
