"""Names of TPU slices: generations and the shapes that there are of them. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend import BackendError

TWO_DIMENSIONAL = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
THREE_DIMENSIONAL = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
SHAPES = {
    "v4": THREE_DIMENSIONAL,
    "v5e": TWO_DIMENSIONAL,
    "v5p": THREE_DIMENSIONAL,
    "v6e": TWO_DIMENSIONAL,
    "tpu7x": THREE_DIMENSIONAL,
}
"""Generation, by JAX's name, and the shapes of its slices: those that clouds rent, and one chip for tests."""

OTHER_NAMES = {
    **dict.fromkeys(("v5litepod", "v5lite"), "v5e"),
    "v5": "v5p",
    **dict.fromkeys(("v6", "trillium"), "v6e"),
    **dict.fromkeys(("v7x", "tpu-v7x", "ironwood"), "tpu7x"),
}
"""What generations are called elsewhere, and JAX's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyName:
    """A slice's name in parts: v5e:2x4."""

    generation: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"


def parse_topology(name: str) -> TopologyName:
    """Reads `generation:shape`.

    Raises:
        BackendError: no such slice; the line lists what there is.
    """
    generation, _, shape = name.strip().lower().partition(":")
    generation = OTHER_NAMES.get(generation, generation)
    if generation not in SHAPES:
        raise BackendError(
            f"topology {name!r}: no TPU generation {generation!r}; use {', '.join(SHAPES)} and a shape, "
            "such as v5e:2x4 or v5p:2x2x2"
        )
    shapes = SHAPES[generation]
    if shape not in shapes:
        raise BackendError(
            f"topology {name!r}: no {generation} slice {shape or '(none)'!r}; use one of {', '.join(shapes)}"
        )
    return TopologyName(generation=generation, shape=tuple(int(extent) for extent in shape.split("x")))
