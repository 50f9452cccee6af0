"""Compiling step programs for a slice that is not here, and what the compiled program says about memory and traffic.

The compiler is the one that TPU hosts run, so its numbers are theirs: bytes of arguments, temporaries and results per
chip are exact, traffic is read from the optimized program (see backends.jax.analysis). All numbers are per chip, that
is per JAX device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax

from backends.jax.analysis import (
    Collective,
    Instruction,
    KernelBytes,
    Traffic,
    declared_bytes,
    measure_traffic,
    parse_hlo,
)
from backends.jax.analysis.hlo import HBM
from backends.jax.deployment import Deployment
from backends.jax.kernels import choose_kernels
from backends.jax.model_config import ModelConfig
from backends.jax.sharding import create_mesh
from backends.jax.step import StepShape
from backends.jax.topology import open_topology, take_devices
from engine.backend import BackendError
from engine.config import EngineConfig
from engine.errors import first_line

__all__ = [
    "Collective",
    "ProgramReport",
    "compile_step",
    "open_deployment",
    "open_topology",
    "report_on",
    "take_devices",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramReport:
    """One compiled program on one chip."""

    argument_bytes: int  # weights, KV cache, history, tables, the packed step
    output_bytes: int
    alias_bytes: int  # of the outputs that take an argument's place
    temp_bytes: int
    code_bytes: int
    hbm_bytes: int  # read and written in one run, without what attention kernels read of the KV cache
    hbm_bytes_most: int  # likewise, where a step asks for penalties, log-probabilities and all
    flops: int
    collectives: tuple[Collective, ...]
    kernels: Mapping[str, int]  # calls of custom kernels in one run
    largest: tuple[tuple[int, str], ...]  # (bytes, instruction) that move most
    compile_seconds: float

    @property
    def peak_bytes(self) -> int:
        """HBM that the program needs in all."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def open_deployment(config: EngineConfig, model: ModelConfig, topology: str) -> Deployment:
    """The deployment of these options on the first `tensor_parallel_size` devices of a slice, with TPU kernels.

    Raises:
        BackendError: no such slice, too few devices, or a model that can't be cut like that.
    """
    devices = take_devices(open_topology(topology), config.tensor_parallel_size)
    kernels = choose_kernels(config, model, "tpu")
    return Deployment(config, model, create_mesh(list(devices)), kernels=kernels).supported()


def compile_step(deployment: Deployment, shape: StepShape, num_blocks: int) -> ProgramReport:
    """Compiles one step program of a deployment whose mesh may be a topology's.

    Args:
        num_blocks: KV blocks per chip, the dump block not counted.

    Raises:
        BackendError: the compiler refuses it, for lack of memory or otherwise; one line.
    """
    state = deployment.state_shapes(num_blocks)
    lowered = deployment.lower(shape, deployment.parameter_shapes(), state, deployment.table_shapes())
    chip_cache = state.cache.sharding.shard_shape(state.cache.shape)
    return report_on(lowered, kernel_bytes=without_cache(chip_cache))


def report_on(lowered: jax.stages.Lowered, kernel_bytes: KernelBytes = declared_bytes) -> ProgramReport:
    """Compiles and measures any lowered program.

    Raises:
        BackendError: the compiler refuses it.
    """
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise BackendError(_compile_problem(error)) from error
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    assert memory is not None  # libtpu always has it
    module = parse_hlo(compiled.as_text() or "")

    def traffic(taken: Callable[[list[int]], int]) -> Traffic:
        return measure_traffic(module, kernel_bytes=kernel_bytes, taken=taken)

    usual = traffic(min)
    return ProgramReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        hbm_bytes=usual.hbm_bytes,
        hbm_bytes_most=traffic(max).hbm_bytes,
        flops=usual.flops,
        collectives=usual.collectives,
        kernels=usual.kernels,
        largest=usual.largest,
        compile_seconds=seconds,
    )


def without_cache(cache_shape: tuple[int, ...]) -> KernelBytes:
    """Traffic of custom kernels: a kernel that gets the KV cache counts with its other arrays only."""

    def kernel_bytes(kernel: Instruction, operands: Sequence[Instruction]) -> tuple[int, int] | None:
        arrays = [array for operand in operands for array in operand.arrays]
        if all(array.dims != cache_shape for array in arrays):
            return declared_bytes(kernel, operands)
        read, written = (
            sum(array.num_bytes for array in side if array.space == HBM and array.dims != cache_shape)
            for side in (arrays, kernel.arrays)
        )
        return read, written

    return kernel_bytes


def _compile_problem(error: Exception) -> str:
    """The compiler's refusal in one line."""
    text = str(error)
    size = r"([\d.]+[KMGT])"
    used = re.search(rf"Used {size} of {size} hbm|required .*\({size}\) exceeds available HBM \({size}\)", text)
    if used:
        needed, available = filter(None, used.groups())
        return (
            f"the program needs {needed}iB of {available}iB HBM per chip; "
            "use fewer KV blocks, more chips or int8 weights"
        )
    return f"the TPU compiler refuses the program: {first_line(error)}"
