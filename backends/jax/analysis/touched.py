"""How many bytes of HBM one instruction reads and writes, in itself.

A slice or gather touches what it takes, an update in place what it changes, also inside a fusion; what lies in VMEM
costs nothing; tiles count with their padding. An operand is read once, however many tiles of a product need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from backends.jax.analysis.hlo import HBM, Array, Computation, HloModule, Instruction

KERNEL_TARGET = "tpu_custom_call"
"""Custom-call target of Pallas kernels."""

_SLICING = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode -> which operand holds the new values."""
_NO_WORK_TARGETS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding")

KernelBytes = Callable[[Instruction, Sequence[Instruction]], tuple[int, int] | None]
"""(kernel, operands) -> bytes (read, written) of one call of a custom kernel; None: its operands and results."""


def declared_bytes(kernel: Instruction, operands: Sequence[Instruction]) -> tuple[int, int] | None:  # noqa: ARG001
    """KernelBytes by the kernel's own cost estimate, if it has one."""
    found = re.search(r'"bytes_accessed":"?(\d+)', kernel.attributes)
    return (int(found[1]), 0) if found else None


def num_bytes(i: Instruction) -> int:
    """Size of a value, wherever it lies."""
    return sum(array.num_bytes for array in i.arrays)


def custom_call_target(i: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', i.attributes)
    return found[1] if found else ""


class HbmMeter:
    """Weighs instructions of one module that are no control flow."""

    def __init__(self, module: HloModule, kernel_bytes: KernelBytes) -> None:
        self._module = module
        self._kernel_bytes = kernel_bytes

    def moved(self, i: Instruction, operands: list[Instruction]) -> tuple[int, int]:
        """HBM bytes (read, written) of an instruction that is no control flow."""
        if i.opcode.endswith("-start"):
            return _sent(i, operands), 0
        if i.opcode.endswith("-done"):
            return 0, i.hbm_bytes
        if i.opcode == "fusion":
            return self._fusion(i, operands)
        if i.opcode == "custom-call":
            return self._custom_call(i, operands)
        if i.opcode in _SLICING:
            rest = sum(operand.hbm_bytes for operand in operands[1:])
            return (num_bytes(i) if operands[0].hbm_bytes else 0) + rest, i.hbm_bytes
        if i.opcode in _IN_PLACE:
            update = operands[_IN_PLACE[i.opcode]]
            rest = sum(operand.hbm_bytes for operand in operands[1:])
            return rest, num_bytes(update) if i.hbm_bytes else 0
        unique = {operand.name: operand for operand in operands}
        return sum(operand.hbm_bytes for operand in unique.values()), i.hbm_bytes

    def _fusion(self, i: Instruction, operands: list[Instruction]) -> tuple[int, int]:
        computation = self._module.computation(i.called["calls"])
        read = 0
        for operand, parameter in zip(operands, computation.parameters, strict=True):
            if operand.hbm_bytes:
                read += min(operand.hbm_bytes, self._used(computation, parameter.name, operand.hbm_bytes))
        root = computation.root
        leaves = [computation.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(leaves) != len(i.arrays):
            return read, i.hbm_bytes
        return read, sum(
            self._stored(computation, leaf, array)
            for leaf, array in zip(leaves, i.arrays, strict=True)
            if array.space == HBM
        )

    def _used(self, computation: Computation, name: str, whole: int) -> int:
        """How much of a fused computation's value `name`, of `whole` bytes, is read."""
        read = 0
        for user in computation.users(name):
            place = user.operands.index(name)
            if user.opcode in _SLICING and place == 0:
                read += num_bytes(user)
            elif user.opcode in _IN_PLACE and place == 0:
                continue
            elif (user.opcode == "bitcast" or _renames_tiles(user)) and not user.is_root:
                read += self._used(computation, user.name, whole)
            elif user.opcode == "fusion":
                inner = self._module.computation(user.called["calls"])
                read += self._used(inner, inner.parameters[place].name, whole)
            else:
                return whole
        return read

    def _stored(self, computation: Computation, leaf: Instruction, array: Array) -> int:
        """How much of a fusion's result is written: all of it, or the update of what stays in place."""
        while leaf.opcode == "bitcast":
            leaf = computation.instructions[leaf.operands[0]]
        if leaf.opcode in _IN_PLACE:
            return num_bytes(computation.instructions[leaf.operands[_IN_PLACE[leaf.opcode]]])
        if leaf.opcode == "fusion":
            inner = self._module.computation(leaf.called["calls"])
            return self._stored(inner, inner.root, array) if inner.root.opcode != "tuple" else array.num_bytes
        return array.num_bytes

    def _custom_call(self, i: Instruction, operands: list[Instruction]) -> tuple[int, int]:
        if custom_call_target(i) in _NO_WORK_TARGETS:
            return 0, 0
        known = self._kernel_bytes(i, operands) if custom_call_target(i) == KERNEL_TARGET else None
        if known is not None:
            return known
        unique = {operand.name: operand for operand in operands}
        return sum(operand.hbm_bytes for operand in unique.values()), i.hbm_bytes


def _renames_tiles(i: Instruction) -> bool:
    """Whether a fusion inside a fusion gives its operand, int8 as a rule, another tiling with the same byte order."""
    return i.opcode == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in i.attributes


def _sent(i: Instruction, operands: list[Instruction]) -> int:
    """What the first half of a transfer reads; its -done counts the writing."""
    if i.opcode == "slice-start" and operands[0].hbm_bytes:
        return i.arrays[len(operands[0].arrays)].num_bytes  # ((source), slice, semaphore)
    return sum(operand.hbm_bytes for operand in operands)
