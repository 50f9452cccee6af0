"""What would work instead: the slices, quantization and contexts nearest to a plan that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cluster.plan.fitting import fits
from cluster.plan.request import PlanRequest, choose_parallelism, default_step_tokens
from cluster.topology import NEURON_INSTANCES, NeuronInstance, TpuSlice, tpu_slices
from engine.config import EngineConfig

_SHORTEST = 512  # tokens; a shorter context is no advice
_MOST_CHIPS = 64


def what_would_fit(request: PlanRequest) -> str:
    """Half a sentence for an error."""
    ways = [way for way in (_option(request), _slice(request), _int8(request), _context(request)) if way]
    return "it fits " + ", or ".join(ways) if ways else f"no slice of up to {_MOST_CHIPS} chips holds it"


def _option(request: PlanRequest) -> str | None:
    """An option that was set, where its default would do."""
    factor = float(EngineConfig.model_fields["hbm_utilization_factor"].default)
    tokens = default_step_tokens(request.max_rows)
    for name, value, changed in (
        ("hbm_utilization_factor", factor, replace(request, utilization=factor)),
        ("max_num_batched_tokens", tokens, replace(request, step_tokens=tokens)),
    ):
        if changed != request and fits(changed):
            return f"with {name}={value:g}"
    return None


def _slice(request: PlanRequest) -> str | None:
    for topology in _larger(request.topology):
        moved = on(request, topology)
        if fits(moved):
            return f"on {topology.name} (tensor_parallel_size={moved.tensor_parallel})"
    return None


def _int8(request: PlanRequest) -> str | None:
    """The smallest slice of the same generation for quantized weights, if it is smaller than that for the others."""
    if request.quantization is not None:
        return None
    quantized = replace(request, quantization="int8")
    if fits(quantized):
        return f"on {request.topology.name} with quantization=int8"
    for topology in _larger(request.topology):
        if fits(on(request, topology)):
            return None
        if fits(on(quantized, topology)):
            return f"on {topology.name} with quantization=int8"
    return None


def _context(request: PlanRequest) -> str | None:
    """The longest context that fits and holds the workload's requests, in whole powers of two."""
    length = 1 << ((request.max_model_len or request.model.max_position) - 1).bit_length() - 1
    while length >= max(_SHORTEST, request.workload.tokens):
        if fits(replace(request, max_model_len=length)):
            return f"with max_model_len={length}"
        length //= 2
    return None


def on(request: PlanRequest, topology: TpuSlice | NeuronInstance) -> PlanRequest:
    """The same request on another slice, with the parallelism that is the default there."""
    tensor_parallel, data_parallel = choose_parallelism(request.model, topology, None, None)
    return replace(request, topology=topology, tensor_parallel=tensor_parallel, data_parallel=data_parallel)


def _larger(topology: TpuSlice | NeuronInstance) -> Iterator[TpuSlice | NeuronInstance]:
    """Larger ones of the same kind, then those of the other generations, small ones first."""
    if isinstance(topology, NeuronInstance):
        yield from (other for other in NEURON_INSTANCES.values() if other.num_devices > topology.num_devices)
        return
    affordable = [candidate for candidate in tpu_slices() if candidate.num_chips <= _MOST_CHIPS]
    same = topology.generation.name
    yield from (s for s in affordable if s.generation.name == same and s.num_chips > topology.num_chips)
    others = (s for s in affordable if s.generation.name != same)
    yield from sorted(others, key=lambda s: s.usd_per_hour or float("inf"))
