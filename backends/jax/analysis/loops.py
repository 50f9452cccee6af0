"""How often a `while` of optimized HLO runs, where its counter, bound and step are constants, as in `lax.fori_loop`."""

from __future__ import annotations

import re

from backends.jax.analysis.hlo import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_SAME_VALUE = frozenset(("copy", "bitcast", "copy-start", "copy-done"))


def rounds(loop: Instruction, inside: Computation, module: HloModule) -> int | None:
    """Number of rounds of `loop`, an instruction of `inside`; None when it is decided at run time."""
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition, body = (module.computation(loop.called[part]) for part in ("condition", "body"))
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes or len(compare.operands) != 2:
        return None
    counter = _place(condition, compare.operands[0])
    if counter is None:
        return None
    initial = inside.instructions[loop.operands[0]]
    start = _carried(initial, inside, counter)
    bound = _value(condition, compare.operands[1], initial, inside)
    step = _step(body, counter, initial, inside)
    if start is None or bound is None or step is None or step < 1:
        return None
    return max(0, -(-(bound - start) // step))


def _step(body: Computation, counter: int, initial: Instruction, inside: Computation) -> int | None:
    """What the body adds to the counter."""
    if body.root.opcode != "tuple":
        return None
    add = _origin(body, body.root.operands[counter])
    if add.opcode != "add" or len(add.operands) != 2:
        return None
    for mine, other in (add.operands, reversed(add.operands)):
        if _place(body, mine) == counter:
            return _value(body, other, initial, inside)
    return None


def _value(computation: Computation, name: str, initial: Instruction, inside: Computation) -> int | None:
    """A constant of the loop's body or condition, or one that the loop carries unchanged (XLA moves them there)."""
    origin = _origin(computation, name)
    if origin.opcode == "constant":
        return _integer(origin)
    place = _place(computation, name)
    return None if place is None else _carried(initial, inside, place)


def _carried(initial: Instruction, inside: Computation, place: int) -> int | None:
    if initial.opcode != "tuple":
        return None
    origin = _origin(inside, initial.operands[place])
    return _integer(origin) if origin.opcode == "constant" else None


def _place(computation: Computation, name: str) -> int | None:
    """Which element of the computation's tuple parameter a value is."""
    origin = _origin(computation, name)
    if origin.opcode != "get-tuple-element":
        return None
    if computation.instructions[origin.operands[0]].opcode != "parameter":
        return None
    found = re.search(r"\bindex=(\d+)", origin.attributes)
    return int(found[1]) if found else None


def _origin(computation: Computation, name: str) -> Instruction:
    instruction = computation.instructions[name]
    while instruction.opcode in _SAME_VALUE:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _integer(constant: Instruction) -> int | None:
    return int(constant.attributes) if constant.attributes.lstrip("-").isdigit() else None
