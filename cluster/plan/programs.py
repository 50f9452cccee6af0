"""What a deployment's programs take and cost on one device, wherever the numbers come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.jax.attention import PagedAttention
from backends.jax.kernels import Kernels, paged_attention
from backends.jax.slots import slot_bytes
from cluster.plan.costs import AnalyticCosts, StepCosts
from cluster.plan.request import PlanRequest
from cluster.plan.sizing import DTYPE, Shard
from cluster.topology import NeuronInstance
from engine.backend import Capabilities


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
    unknown_loops: int = 0  # of the compiled programs; each is counted once


def formula_programs(request: PlanRequest) -> Programs:
    """Everything by formula, in no time."""
    shard = request.shard
    max_len = request.max_model_len or request.model.max_position
    return Programs(
        source="formula",
        weight_bytes=shard.weight_bytes,
        other_bytes=_slot_bytes(request.max_rows, max_len),
        kv_bytes_per_block=_kv_bytes_per_block(request),
        temporary_bytes=shard.temporary_bytes(request.step_tokens, request.max_rows),
        costs=AnalyticCosts(shard=shard, devices_per_chip=request.devices_per_chip),
    )


@cache
def _slot_bytes(rows: int, max_model_len: int) -> int:
    return slot_bytes(rows, max_model_len, Capabilities())


def _kv_bytes_per_block(request: PlanRequest) -> int:
    """With what the TPU cache's layout pads: where a device has few or narrow heads, that is a lot."""
    shard = request.shard
    if isinstance(request.topology, NeuronInstance):
        return shard.kv_bytes_per_token * request.block_size
    return _tpu_bytes_per_block(shard, request.block_size)


@cache
def _tpu_bytes_per_block(shard: Shard, block_size: int) -> int:
    def attention(kernels: Kernels) -> PagedAttention:
        return paged_attention(kernels, shard.config, shard.partition.heads, block_size=block_size, dtype=DTYPE)

    ours = attention("pallas")
    return (ours if ours.problem() is None else attention("xla")).bytes_per_block
