"""Compiling step programs for a slice that is not here, and what the compiled program says about memory and traffic.

The compiler is the one that TPU hosts run, so its numbers are theirs: bytes of arguments, temporaries and results per
chip are exact, traffic is read from the optimized program (see backends.jax.analysis). All numbers are per chip, that
is per JAX device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from backends.jax.analysis import Collective, Instruction, KernelBytes, declared_bytes, measure_traffic, parse_hlo
from backends.jax.analysis.hlo import HBM
from backends.jax.compilation import compile_program
from backends.jax.deployment import Deployment
from backends.jax.kernels import choose_kernels
from backends.jax.model_config import ModelConfig
from backends.jax.sharding import create_mesh
from backends.jax.step import StepShape
from backends.jax.topology import open_topology, take_devices
from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramReport:
    """One compiled program on one chip."""

    argument_bytes: int  # weights, KV cache, history, tables, the packed step
    output_bytes: int
    alias_bytes: int  # of the outputs that take an argument's place
    temp_bytes: int
    code_bytes: int
    hbm_bytes: int  # read and written in one run, without what attention kernels read of the KV cache
    flops: int
    collectives: tuple[Collective, ...]
    kernels: Mapping[str, int]  # calls of custom kernels in one run
    unknown_loops: int  # loops whose rounds are decided at run time, each counted once in bytes, FLOPs and collectives
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
    compiled = compile_program(lowered)
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    assert memory is not None  # libtpu always has it
    traffic = measure_traffic(parse_hlo(compiled.as_text() or ""), kernel_bytes=kernel_bytes)
    return ProgramReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        hbm_bytes=traffic.hbm_bytes,
        flops=traffic.flops,
        collectives=traffic.collectives,
        kernels=traffic.kernels,
        unknown_loops=traffic.unknown_loops,
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
