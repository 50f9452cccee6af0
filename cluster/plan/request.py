"""What is planned: a model, a slice, and the options of the server that matter for it."""

from __future__ import annotations

from dataclasses import dataclass

from backends.jax.deployment import TPU_CHUNK_TOKENS
from backends.jax.model_config import ModelConfig
from cluster.plan.errors import PlanError
from cluster.plan.sizing import Shard, usable_tensor_parallel
from cluster.plan.workload import Workload
from cluster.topology import NeuronInstance, TpuSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """One deployment on one slice: `data_parallel` groups of `tensor_parallel` devices."""

    model_name: str
    model: ModelConfig
    topology: TpuSlice | NeuronInstance
    tensor_parallel: int
    data_parallel: int
    quantization: str | None
    max_model_len: int | None
    utilization: float  # hbm_utilization_factor
    max_rows: int  # max_running_seqs
    step_tokens: int  # max_num_batched_tokens
    block_size: int
    workload: Workload
    prefill_slices: int = 0  # of a disaggregated deployment; 0: every slice does both
    decode_slices: int = 0
    sliding_window: int | None = None  # asked for in place of the model's, and part of `model` already; tokens

    @property
    def shard(self) -> Shard:
        return Shard(config=self.model, tensor_parallel=self.tensor_parallel, quantization=self.quantization)

    @property
    def devices_per_chip(self) -> int:
        return self.topology.generation.devices_per_chip if isinstance(self.topology, TpuSlice) else 1

    @property
    def num_slices(self) -> int:
        return max(1, self.prefill_slices + self.decode_slices)


def default_step_tokens(max_rows: int) -> int:
    """What the TPU backend takes for max_num_batched_tokens where it isn't given, with chunked prefill."""
    return max(TPU_CHUNK_TOKENS, max_rows)


def choose_parallelism(
    model: ModelConfig, topology: TpuSlice | NeuronInstance, tensor_parallel: int | None, data_parallel: int | None
) -> tuple[int, int]:
    """Sizes of the tensor- and data-parallel dimensions; together they use all devices.

    Without a wish, tensor parallelism takes all devices, or as many as there are heads for.

    Raises:
        PlanError: the devices can't be divided like that, or some would have no head.
    """
    devices = topology.num_devices
    sizes = usable_tensor_parallel(model, devices)
    if tensor_parallel is None and data_parallel is None:
        return max(sizes), devices // max(sizes)
    if tensor_parallel is None:
        assert data_parallel is not None
        tensor_parallel = devices // data_parallel if devices % data_parallel == 0 else 0
    if tensor_parallel > model.num_heads:
        raise PlanError(
            f"tensor_parallel_size={tensor_parallel} is more than the model's {model.num_heads} attention heads, "
            f"which can't be split; sizes that work on {topology.name}: {_listed(sizes)}"
        )
    if tensor_parallel not in sizes:
        asked = f"tensor_parallel_size={tensor_parallel}" if tensor_parallel else f"data_parallel_size={data_parallel}"
        raise PlanError(
            f"{asked} does not divide the {devices} devices of {topology.name}; "
            f"tensor_parallel_size may be {_listed(sizes)}"
        )
    groups = devices // tensor_parallel
    if data_parallel not in (None, groups):
        raise PlanError(
            f"tensor_parallel_size={tensor_parallel} and data_parallel_size={data_parallel} use "
            f"{tensor_parallel * data_parallel} of the {devices} devices of {topology.name}; "
            f"with tensor_parallel_size={tensor_parallel} data_parallel_size is {groups}"
        )
    return tensor_parallel, groups


def check_context(request: PlanRequest) -> None:
    """Refuses contexts that the model or max_model_len don't have.

    Raises:
        PlanError: max_model_len or the workload's requests are too long.
    """
    limit = request.max_model_len or request.model.max_position
    if limit > request.model.max_position:
        raise PlanError(
            f"max_model_len={limit} is more than the model's {request.model.max_position} positions; "
            f"use {request.model.max_position} or less"
        )
    if request.workload.tokens > limit:
        cause = "max_model_len" if request.max_model_len else "the model's context"
        raise PlanError(
            f"the workload's requests have {request.workload.tokens} tokens, {cause} is {limit}; "
            f"use in + out of {limit} or less" + (", or raise max_model_len" if request.max_model_len else "")
        )


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
