"""The EngineModel of a TPU slice: memory and the time of steps as `sliceserve plan` sees them, without the slice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.plan.calibration import EXPECTED
from cluster.plan.costs import StepCosts
from cluster.plan.models import open_model_config
from cluster.plan.planner import Plan, check_fits, make_plan
from cluster.plan.prices import load_prices
from cluster.plan.request import PlanRequest, choose_parallelism, default_step_tokens
from cluster.plan.roofline import Efficiency, Peaks, decode_s, prefill_s
from cluster.plan.workload import Workload
from cluster.simulate.errors import SimulationError
from cluster.simulate.models import EngineModel, engine_model
from cluster.topology import TpuSlice, find_topology
from engine.backend import BackendInfo, Capabilities
from engine.batch import StepBatch
from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceChoice:
    """A model, and the TPU slice that an engine of it runs on (or on a tensor-parallel group of it)."""

    model: str  # folder, config.json, .gguf file or hub id
    topology: str  # "v5e:2x4"


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineClock:
    """A TPU slice's time, as `sliceserve plan` expects it: the reading of weights and keys, and prefill beside it."""

    costs: StepCosts
    peaks: Peaks
    efficiency: Efficiency

    def step_s(self, batch: StepBatch) -> float:
        decoding = batch.query_lens == 1
        seconds = self.decode_s(int(np.count_nonzero(decoding)), int(batch.kv_lens[decoding].sum()))
        if batch.is_decode_only:
            return seconds
        for row in np.flatnonzero(~decoding).tolist():
            tokens, end = int(batch.query_lens[row]), int(batch.kv_lens[row])
            cost = self.costs.prefill(tokens, end - tokens / 2)
            seconds += prefill_s(cost, self.peaks, self.efficiency)
        return seconds

    def decode_s(self, num_rows: int, kv_tokens: int) -> float:
        context = kv_tokens / num_rows if num_rows else 0.0
        return decode_s(self.costs.decode(num_rows, context), self.peaks, self.efficiency)


def slice_model(config: EngineConfig, choice: SliceChoice, prompt_tokens: int, output_tokens: int) -> EngineModel:
    """An engine on a TPU slice, as `sliceserve plan --no_compile` sees it.

    Args:
        prompt_tokens, output_tokens: of a usual request, for which the KV cache must have room.

    Raises:
        PlanError, TopologyError, SimulationError: no such model or slice, or the model does not fit there.
    """
    topology = find_topology(choice.topology)
    if not isinstance(topology, TpuSlice):
        raise SimulationError(f"--topology={choice.topology}: only TPU slices have a time model; give one like v5e:2x4")
    plan = make_plan(_plan_request(config, choice, topology, prompt_tokens, output_tokens), load_prices(None))
    check_fits(plan)
    clock = RooflineClock(costs=plan.programs.costs, peaks=Peaks.of(topology), efficiency=EXPECTED)
    return engine_model(config, _backend_info(config, plan), clock)


def _plan_request(
    config: EngineConfig, choice: SliceChoice, topology: TpuSlice, prompt_tokens: int, output_tokens: int
) -> PlanRequest:
    model = open_model_config(choice.model)
    wished = config.tensor_parallel_size if config.tensor_parallel_size > 1 else None
    tensor_parallel, groups = choose_parallelism(model, topology, wished, None)
    limit = config.max_model_len or model.max_position
    prompt_tokens = min(prompt_tokens, limit - 1)
    return PlanRequest(
        model_name=choice.model,
        model=model,
        topology=topology,
        tensor_parallel=tensor_parallel,
        data_parallel=groups,
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        utilization=config.hbm_utilization_factor,
        max_rows=config.max_decode_seqs,
        step_tokens=config.max_num_batched_tokens or default_step_tokens(config.max_decode_seqs),
        block_size=config.block_size,
        workload=Workload(
            input_tokens=prompt_tokens,
            output_tokens=min(output_tokens, limit - prompt_tokens),
            concurrency=config.max_decode_seqs,
        ),
    )


def _backend_info(config: EngineConfig, plan: Plan) -> BackendInfo:
    request, memory = plan.request, plan.memory
    return BackendInfo(
        device=f"{request.topology.name}, tensor_parallel_size={request.tensor_parallel}",
        vocab_size=request.model.vocab_size,
        eos_token_ids=(),
        max_model_len=memory.max_model_len,
        num_blocks=config.num_blocks or memory.num_blocks,
        block_size=config.block_size,
        bytes_per_block=memory.kv_bytes_per_block * request.tensor_parallel,
        max_step_tokens=request.step_tokens,
        max_step_rows=config.max_decode_seqs,
        max_prefill_rows=config.max_prefill_seqs or config.max_decode_seqs,
        capabilities=Capabilities(kv_exchange=True),
    )
