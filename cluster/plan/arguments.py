"""The arguments of the server that a plan stands for, ready to paste, and those among them that are not built yet."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from cluster.plan.planner import Plan
from cluster.plan.request import PlanRequest, default_step_tokens
from cluster.topology import NeuronInstance
from engine.config import ConfigError, EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArguments:
    available: tuple[str, ...]  # "--name=value"
    pending: tuple[str, ...]  # the server refuses these still

    @property
    def command(self) -> str:
        return shlex.join(("sliceserve", "serve", *self.available))


def server_arguments(plan: Plan) -> ServerArguments:
    """Asks EngineConfig about each option, so that what is printed is what the server takes."""
    available: list[str] = []
    pending: list[str] = []
    for name, value in _options(plan).items():
        (available if _is_taken(name, value) else pending).append(f"--{name}={value}")
    return ServerArguments(available=tuple(available), pending=tuple(pending))


def _options(plan: Plan) -> dict[str, Any]:
    request, memory = plan.request, plan.memory
    rows = min(request.max_rows, memory.safe_rows(request.workload))
    neuron = isinstance(request.topology, NeuronInstance)
    options: dict[str, Any] = {
        "model": request.model_name,
        "backend": "neuron" if neuron else "tpu",
        "max_model_len": memory.max_model_len,
        "hbm_utilization_factor": min(request.utilization, memory.safe_factor),
        "max_running_seqs": max(1, rows),
    }
    if request.tensor_parallel > 1:
        options["tensor_parallel_size"] = request.tensor_parallel
    if request.data_parallel > 1:
        options["data_parallel_size"] = request.data_parallel
    if hosts_per_group(request) > 1:
        options["num_hosts"] = hosts_per_group(request)
    if request.quantization is not None:
        options["quantization"] = request.quantization
    if request.block_size != EngineConfig.model_fields["block_size"].default:
        options["block_size"] = request.block_size
    if request.step_tokens != default_step_tokens(max(1, rows)):
        options["max_num_batched_tokens"] = request.step_tokens
    if request.sliding_window is not None:
        options["sliding_window"] = request.sliding_window
    if request.prefill_slices:
        options["disagg_topo"] = f"{request.prefill_slices},{request.decode_slices}"
    return options


def hosts_per_group(request: PlanRequest) -> int:
    """Hosts that the devices of one tensor-parallel group are on; one replica's `num_hosts`."""
    if isinstance(request.topology, NeuronInstance):
        return 1
    return -(-request.tensor_parallel // (request.topology.chips_per_host * request.devices_per_chip))


def _is_taken(name: str, value: Any) -> bool:
    try:
        EngineConfig.from_args({name: value})
    except ConfigError:
        return False
    return True
