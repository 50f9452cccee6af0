"""A reader of optimized HLO text: computations, instructions, and shapes with their layout and memory space.

It knows the syntax and nothing of what instructions mean. Only what the traffic analysis asks for is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HBM = 0
"""Memory space of arrays without an S(n) in their layout; 1 is VMEM, the others are smaller still."""

_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s2", "u2"), 2),
    "c128": 128,
    "token": 0,
}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class HloError(ValueError):
    """The text is not what this reader knows as optimized HLO."""


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a value's shape."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]  # of the minor dimensions, major first; () = none
    space: int

    @property
    def num_bytes(self) -> int:
        """What it takes in memory: tiles are padded, so that bf16[8, 64] in tiles of (8, 128) takes twice its data."""
        bits = _BITS.get(self.dtype, 8)  # all other types are float8 variants
        sizes = [self.dims[axis] for axis in reversed(self.minor_to_major)]  # major first
        for place, extent in enumerate(reversed(self.tile), start=1):
            if place <= len(sizes):
                sizes[-place] = -(-sizes[-place] // extent) * extent
        return math.prod(sizes) * bits // 8

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result; a tuple's leaves in order
    operands: tuple[str, ...]
    called: Mapping[str, str]  # "body" -> computation's name, …
    branches: tuple[str, ...]
    attributes: str  # the rest of the line, backend_config included
    is_root: bool

    @property
    def hbm_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays if array.space == HBM)


@dataclass(frozen=True, slots=True)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """By their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.attributes)))

    def users(self, name: str) -> Iterator[Instruction]:
        return (i for i in self.instructions.values() if name in i.operands)


@dataclass(frozen=True, slots=True)
class HloModule:
    computations: Mapping[str, Computation]
    entry: Computation

    def computation(self, name: str) -> Computation:
        try:
            return self.computations[name]
        except KeyError:
            raise HloError(f"computation {name} is called but not defined") from None


def parse_hlo(text: str) -> HloModule:
    """Reads what `Compiled.as_text()` returns.

    Raises:
        HloError: it has another syntax.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    lines = iter(text.splitlines())
    for line in lines:
        header = _COMPUTATION.match(line)
        if header is None:
            continue
        computation = Computation(name=header[2], instructions=_read_instructions(lines))
        computations[computation.name] = computation
        if header[1]:
            entry = computation
    if entry is None:
        raise HloError("no ENTRY computation in the HLO text")
    return HloModule(computations=computations, entry=entry)


def _read_instructions(lines: Iterator[str]) -> dict[str, Instruction]:
    instructions = {}
    for line in lines:
        if line.startswith("}"):
            break
        if line.strip():
            instruction = _read_instruction(line)
            instructions[instruction.name] = instruction
    return instructions


def _read_instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    if head is None:
        raise HloError(f"not an HLO instruction: {line.strip()[:120]}")
    line = _COMMENT.sub("", line[head.end() :])
    end = _matching(line, 0) if line.startswith("(") else line.index(" ")
    shape, rest = line[:end], line[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _matching(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : close - 1], rest[close:]
    return Instruction(
        name=head[2],
        opcode=opcode,
        arrays=tuple(_read_array(match) for match in _ARRAY.finditer(shape)),
        operands=tuple(_OPERAND.findall(inside)),
        called=dict(_CALLED.findall(attributes)),
        branches=_branches(attributes),
        attributes=inside if opcode in ("parameter", "constant") else attributes,
        is_root=head[1] is not None,
    )


def _branches(attributes: str) -> tuple[str, ...]:
    listed = _BRANCHES.search(attributes)
    if listed:
        return tuple(name.strip().lstrip("%") for name in listed[1].split(","))
    called = dict(_CALLED.findall(attributes))
    return tuple(called[key] for key in ("true_computation", "false_computation") if key in called)


def _read_array(match: re.Match[str]) -> Array:
    dims = tuple(int(size.removeprefix("<=")) for size in match[2].split(",") if size)
    layout, _, properties = (match[3] or "").partition(":")
    order = tuple(int(axis) for axis in layout.split(",") if axis)
    tile = re.search(r"T\(([\d,]*)\)", properties)
    space = re.search(r"S\((\d+)\)", properties)
    return Array(
        dtype=match[1],
        dims=dims,
        minor_to_major=order or tuple(reversed(range(len(dims)))),
        tile=tuple(int(extent) for extent in tile[1].split(",") if extent) if tile else (),
        space=int(space[1]) if space else HBM,
    )


def _matching(text: str, start: int) -> int:
    """Index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise HloError(f"unbalanced parentheses: {text[:120]}")
