"""Bytes between HBM and the chip, FLOPs and collectives of one run of a compiled TPU program.

XLA's own `cost_analysis` counts a loop's body once, knows nothing of custom kernels, and counts all of an array that a
slice is taken from. Here loops count as often as they run; a slice, gather or update in place counts what it touches;
what lies in VMEM costs nothing; tiles count with their padding. An instruction reads each operand once: a large matrix
product whose tiles are read again moves more than this says, so the result is a lower bound that decode steps reach.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from backends.jax.analysis.flops import declared_flops, product_flops
from backends.jax.analysis.hlo import Computation, HloError, HloModule, Instruction
from backends.jax.analysis.loops import rounds
from backends.jax.analysis.touched import (
    KERNEL_TARGET,
    HbmMeter,
    KernelBytes,
    custom_call_target,
    declared_bytes,
    num_bytes,
)

_FREE = (
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "domain", "opt-barrier"),
    *("after-all", "add-dependency", "partition-id", "replica-id", "async-update", "async-done", "call-done"),
)
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of collective with one operand size, on every chip of its group."""

    kind: str  # "all-reduce", …
    bytes: int  # per chip and call: its operand; for all-gather its result
    group_size: int
    count: int  # calls in one run of the program


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """One run on one chip."""

    read: int  # bytes from HBM
    written: int  # bytes to HBM
    flops: int  # of matrix products, and what kernels declare
    collectives: tuple[Collective, ...]
    kernels: Mapping[str, int]  # calls of custom kernels, by name
    unknown_loops: int  # loops whose number of rounds is decided at run time; counted once
    largest: tuple[tuple[int, str], ...]  # (bytes, where) of the instructions that move most

    @property
    def hbm_bytes(self) -> int:
        return self.read + self.written


_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Sum:
    read: int = 0
    written: int = 0
    flops: int = 0
    unknown_loops: int = 0
    collectives: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Sum, times: int = 1) -> None:
        self.read += times * other.read
        self.written += times * other.written
        self.flops += times * other.flops
        self.unknown_loops += other.unknown_loops
        _add_counts(self.collectives, other.collectives, times)
        _add_counts(self.kernels, other.kernels, times)
        _add_counts(self.places, other.places, times)


def _add_counts(mine: Counter[_Key], theirs: Counter[_Key], times: int) -> None:
    for key, value in theirs.items():
        mine[key] += times * value


def measure_traffic(
    module: HloModule, *, kernel_bytes: KernelBytes = declared_bytes, taken: Callable[[list[int]], int] = min
) -> Traffic:
    """Adds up one run of the program on one chip.

    Args:
        kernel_bytes: traffic of custom kernels that the text can't tell (how much of the KV cache they read).
        taken: which branch of a conditional runs, by the branches' bytes: `min` is the step that asks for nothing
            special, `max` the worst.
    """
    total = _Meter(module, kernel_bytes, taken).computation(module.entry.name)
    return Traffic(
        read=total.read,
        written=total.written,
        flops=total.flops,
        collectives=tuple(
            Collective(kind=kind, bytes=size, group_size=group, count=count)
            for (kind, size, group), count in sorted(total.collectives.items())
        ),
        kernels=dict(total.kernels),
        unknown_loops=total.unknown_loops,
        largest=tuple((size, place) for place, size in total.places.most_common(20)),
    )


class _Meter:
    def __init__(self, module: HloModule, kernel_bytes: KernelBytes, taken: Callable[[list[int]], int]) -> None:
        self._module = module
        self._hbm = HbmMeter(module, kernel_bytes)
        self._taken = taken
        self._done: dict[str, _Sum] = {}

    def computation(self, name: str) -> _Sum:
        """The sum over a computation that is called, once."""
        if name not in self._done:
            total = _Sum()
            computation = self._module.computation(name)
            for instruction in computation.instructions.values():
                total.add(self._instruction(instruction, computation))
            self._done[name] = total
        return self._done[name]

    def _instruction(self, i: Instruction, inside: Computation) -> _Sum:
        total = _Sum()
        opcode = i.opcode.removesuffix("-start")
        if opcode in _FREE:
            return total
        if opcode == "while":
            self._loop(i, inside, total)
        elif opcode == "conditional":
            branches = [self.computation(name) for name in i.branches]
            sizes = [branch.read + branch.written for branch in branches]
            total.add(branches[sizes.index(self._taken(sizes))])
        elif opcode in ("call", "async"):
            total.add(self.computation(i.called.get("to_apply") or i.called["calls"]))
        else:
            self._work(i, inside, total)
        return total

    def _work(self, i: Instruction, inside: Computation, total: _Sum) -> None:
        operands = [inside.instructions[name] for name in i.operands]
        total.read, total.written = self._hbm.moved(i, operands)
        total.flops = self._flops(i, inside)
        kind = i.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            total.collectives[kind, _collective_bytes(i, operands), _group_size(i)] += 1
        if custom_call_target(i) == KERNEL_TARGET:
            total.kernels[kernel_name(i)] += 1
        if total.read + total.written:
            total.places[_place(i)] = total.read + total.written

    def _loop(self, i: Instruction, inside: Computation, total: _Sum) -> None:
        times = rounds(i, inside, self._module)
        if times is None:
            total.unknown_loops += 1
        for part in ("condition", "body"):
            total.add(self.computation(i.called[part]), 1 if times is None else times)

    def _flops(self, i: Instruction, inside: Computation) -> int:
        if i.opcode == "fusion":
            inner = self._module.computation(i.called["calls"])
            return sum(self._flops(part, inner) for part in inner.instructions.values())
        return declared_flops(i) if i.opcode == "custom-call" else product_flops(i, inside)


def kernel_name(i: Instruction) -> str:
    """The name that a Pallas kernel was given, else the instruction's."""
    found = re.search(r'kernel_name\\?"?[:=]\\?"?(\w+)', i.attributes)
    return found[1] if found else i.name.partition(".")[0]


def _place(i: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', i.attributes)
    return f"{i.opcode} {i.name}" + (f" ({found[1]})" if found else "")


def _collective_bytes(i: Instruction, operands: list[Instruction]) -> int:
    """Per chip: the operand's bytes; an all-gather's result is larger, and is what crosses the wires."""
    size = sum(num_bytes(operand) for operand in operands)
    return size * _group_size(i) if i.opcode.startswith("all-gather") else size


def _group_size(i: Instruction) -> int:
    """Chips of one group: `{{0,1},{2,3}}`, or `[2,4]<=[8]` for 2 groups of 4; 2 for the pairs of a permutation.

    Raises:
        HloError: they are not named, as in programs that the step's shard_map doesn't make.
    """
    if i.opcode.startswith("collective-permute"):
        return 2
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", i.attributes)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", i.attributes)
    if not counted:
        raise HloError(f"{i.name} names no groups of chips")
    return int(counted[1])
