"""What a compiled program does to memory and interconnect, read from its optimized HLO text."""

from backends.jax.analysis.hlo import HloError, HloModule, Instruction, parse_hlo
from backends.jax.analysis.touched import KernelBytes, declared_bytes
from backends.jax.analysis.traffic import Collective, Traffic, kernel_name, measure_traffic

__all__ = [
    "Collective",
    "HloError",
    "HloModule",
    "Instruction",
    "KernelBytes",
    "Traffic",
    "declared_bytes",
    "kernel_name",
    "measure_traffic",
    "parse_hlo",
]
