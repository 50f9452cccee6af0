"""What a deployment's programs take and cost on one device, wherever the numbers come from."""

from __future__ import annotations

from dataclasses import dataclass

from backends.jax.attention import PallasAttention
from cluster.plan.costs import AnalyticCosts, StepCosts
from cluster.plan.request import PlanRequest
from cluster.topology import NeuronInstance


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
        kv_bytes_per_block=_kv_bytes_per_block(request),
        temporary_bytes=shard.temporary_bytes(request.step_tokens, request.max_rows),
        costs=AnalyticCosts(shard=shard, devices_per_chip=request.devices_per_chip),
    )


def _kv_bytes_per_block(request: PlanRequest) -> int:
    """With what the TPU cache's layout pads: where a device has few or narrow heads, that is a lot."""
    shard = request.shard
    if isinstance(request.topology, NeuronInstance):
        return shard.kv_bytes_per_token * request.block_size
    return PallasAttention(
        num_layers=request.model.num_layers,
        num_heads=shard.query_heads,
        num_kv_heads=shard.kv_heads,
        head_dim=request.model.head_dim,
        block_size=request.block_size,
        window=request.model.sliding_window,
        dtype="bfloat16",
    ).bytes_per_block
