"""Floating-point operations of matrix products in optimized HLO. What is not a product is not worth counting."""

from __future__ import annotations

import math
import re

from backends.jax.analysis.hlo import Computation, Instruction


def product_flops(i: Instruction, inside: Computation) -> int:
    """Two per multiplication and addition of a `convolution` or `dot`; 0 for everything else."""
    if i.opcode not in ("convolution", "dot"):
        return 0
    left, right = (inside.instructions[name].arrays[0] for name in i.operands[:2])
    (result,) = i.arrays
    if i.opcode == "dot":
        return 2 * result.num_elements * math.prod(left.dims[axis] for axis in _axes(i, "lhs_contracting_dims"))
    # dim_labels=lhs_rhs->out; the output features "o" of the right side are all that a result element doesn't sum over.
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    assert labels is not None, i.name
    features = right.dims[labels[1].index("o")]
    batches = re.search(r"batch_group_count=(\d+)", i.attributes)
    return 2 * result.num_elements * right.num_elements // features // (int(batches[1]) if batches else 1)


def declared_flops(kernel: Instruction) -> int:
    """What a custom kernel's cost estimate says."""
    found = re.search(r'"flops":"?(\d+)', kernel.attributes)
    return int(found[1]) if found else 0


def _axes(i: Instruction, name: str) -> tuple[int, ...]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", i.attributes)
    return tuple(int(axis) for axis in found[1].split(",") if axis) if found else ()
