"""A plan as JSON. The keys are documented in docs/plan.md and stay."""

from __future__ import annotations

from typing import Any

from cluster.plan.arguments import server_arguments
from cluster.plan.estimate import Performance
from cluster.plan.notes import notes_on
from cluster.plan.planner import Plan, StepReport
from cluster.plan.prices import Prices
from cluster.plan.request import PlanRequest
from cluster.topology import NeuronInstance, TpuSlice


def to_json(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Bytes are per device, times in ms."""
    request, memory = plan.request, plan.memory
    arguments = server_arguments(plan)
    return {
        "model": request.model_name,
        "topology": _topology(request.topology),
        "options": _options(request),
        "workload": {
            "input_tokens": request.workload.input_tokens,
            "output_tokens": request.workload.output_tokens,
            "concurrency": request.workload.concurrency,
        },
        "source": plan.programs.source,
        "compile_seconds": round(plan.programs.compile_seconds, 1),
        "fits": memory.fits,
        "memory_per_device": {
            "usable_bytes": memory.usable_bytes,
            "budget_bytes": memory.budget_bytes,
            "weight_bytes": memory.weight_bytes,
            "kv_bytes": memory.kv_bytes,
            "other_bytes": memory.other_bytes,
            "temporary_bytes": memory.temporary_bytes,
            "missing_bytes": memory.missing_bytes,
        },
        "capacity": {
            "max_model_len": memory.max_model_len,
            "kv_blocks_per_group": memory.num_blocks,
            "kv_tokens_per_group": memory.kv_tokens,
            "kv_tokens": memory.kv_tokens * request.data_parallel,
            "sequences_of_max_model_len": memory.kv_sequences * request.data_parallel,
            "largest_safe_hbm_utilization_factor": memory.safe_factor,
            "largest_safe_max_running_seqs": memory.safe_rows(request.workload),
        },
        "price": {"usd_per_hour": plan.usd_per_hour, "source": prices.source},
        **_performance(plan),
        "notes": notes_on(plan),
        "server_arguments": list(arguments.available),
        "not_available_yet": list(arguments.pending),
    }


def _options(request: PlanRequest) -> dict[str, Any]:
    return {
        "tensor_parallel_size": request.tensor_parallel,
        "data_parallel_size": request.data_parallel,
        "quantization": request.quantization,
        "disagg_topo": f"{request.prefill_slices},{request.decode_slices}" if request.prefill_slices else None,
        "hbm_utilization_factor": request.utilization,
        "max_running_seqs": request.max_rows,
        "max_num_batched_tokens": request.step_tokens,
        "block_size": request.block_size,
    }


def _topology(topology: TpuSlice | NeuronInstance) -> dict[str, Any]:
    common = {"name": topology.name, "devices": topology.num_devices}
    if isinstance(topology, NeuronInstance):
        return {**common, "chips": topology.chips, "hosts": 1, "ray_resources": topology.ray_resources_per_host}
    return {
        **common,
        "chips": topology.num_chips,
        "hosts": topology.num_hosts,
        "chips_per_host": topology.chips_per_host,
        "machine_type": topology.gke_machine_type,
        "ray_resources": topology.ray_resources_per_host,
        "ray_labels": topology.ray_labels,
        "gke_node_selector": topology.gke_node_selector,
    }


def _performance(plan: Plan) -> dict[str, Any]:
    performance = plan.performance
    if performance is None:
        return {"roofline": None, "bounds": None, "expected": None}
    return {
        "roofline": {
            "hbm_bytes_per_s": performance.peaks.hbm_bytes_per_s,
            "flops_per_s": performance.peaks.flops_per_s,
            "ici_bytes_per_s": performance.peaks.ici_bytes_per_s,
            "decode_step": _step(performance.decode),
            "prefill_step": _step(performance.prefill),
        },
        "bounds": _numbers(plan, performance.bound),
        "expected": _numbers(plan, performance.expected),
    }


def _step(step: StepReport) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        "rows": step.rows,
        "mean_context": round(step.context, 1),
        "hbm_bytes": round(step.cost.hbm_bytes),
        "minimum_hbm_bytes": round(step.minimum.hbm_bytes),
        "flops": round(step.cost.flops),
        "ici_bytes": round(step.cost.ici_bytes),
        "hbm_ms": round(step.time.hbm_s * 1e3, 3),
        "mxu_ms": round(step.time.mxu_s * 1e3, 3),
        "ici_ms": round(step.time.ici_s * 1e3, 3),
        "limit": step.time.limit,
    }


def _numbers(plan: Plan, performance: Performance) -> dict[str, Any]:
    cost = plan.usd_per_million(performance)
    return {
        "output_tokens_per_s": round(performance.output_tokens_per_s, 1),
        "ttft_ms": round(performance.ttft_s * 1e3, 2),
        "tpot_ms": round(performance.tpot_s * 1e3, 3),
        "usd_per_million_output_tokens": None if cost is None else round(cost, 4),
        "running_sequences": performance.running * (plan.request.decode_slices or 1) * plan.request.data_parallel,
    }
