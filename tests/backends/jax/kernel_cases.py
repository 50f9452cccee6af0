"""The long form of the TPU kernel's tests (`make test-kernels`): hundreds of random ragged steps per dtype and feature.

Prints, for each dtype, how many steps used each feature and the worst error of each. Programs are few, because to
compile a simulated one takes longer than to run it; windows and chunks are arguments, and differ from step to step.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # its race report has no public name
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention import PallasAttention
from backends.jax.attention.pallas.tiling import BlockSizes
from tests.backends.jax.ragged import LAYERS, Shape, Step, steps, worst_error

SHAPE = Shape(tokens=24, rows=4, context=72)
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "int8": 8e-3, "float8_e4m3fn": 8e-3}
"""Relative to the largest output of a row. Apart from float32, queries and weights are rounded to bfloat16 (2^-9)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program: what is fixed when it is compiled."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    soft_cap: float | None = None
    sinks: bool = False
    block: int = 64  # small, so that short rows have several
    slots: int = 3

    @property
    def attention(self) -> PallasAttention:
        unit = min(self.block_size, self.block)
        return PallasAttention(
            num_layers=LAYERS,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            window=None,
            dtype=self.dtype,
            soft_cap=self.soft_cap,
            sizes=BlockSizes(unit=unit, block=self.block, part=32, slots=self.slots, query_tile=8),
            interpret=pltpu.InterpretParams(detect_races=True),
        )


SHAPES = (
    Case(dtype="", heads=4, kv_heads=2, head_dim=128, block_size=16, soft_cap=5.0, sinks=True),
    Case(dtype="", heads=7, kv_heads=1, head_dim=64, block_size=8, soft_cap=5.0, block=32, slots=2),
    Case(dtype="", heads=3, kv_heads=3, head_dim=96, block_size=32, sinks=True, block=32, slots=4),
    Case(dtype="", heads=4, kv_heads=4, head_dim=64, block_size=2048, soft_cap=5.0, sinks=True),
    Case(dtype="", heads=2, kv_heads=2, head_dim=256, block_size=8),
)


def check(case: Case, step: Step) -> float:
    """The step's worst error.

    Raises:
        AssertionError: two accesses of the same memory race, or the cache differs from what it should be.
    """
    error = worst_error(case.attention, step, SHAPE, case.sinks)
    assert not interpret_pallas_call.races.races_found, "DMAs or reads race"
    return error


class Report:
    """Steps and worst errors by dtype and feature."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = defaultdict(int)
        self._worst: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, case: Case, step: Step, error: float) -> None:
        used = {
            "any": True,
            "decode-only": step.decode_only,
            "mixed": not step.decode_only,
            "window": step.window is not None,
            "chunk": step.chunk is not None,
            "soft cap": case.soft_cap is not None,
            "sinks": case.sinks,
        }
        for feature in (name for name, is_used in used.items() if is_used):
            self._counts[case.dtype, feature] += 1
            self._worst[case.dtype, feature] = max(self._worst[case.dtype, feature], error)

    def __str__(self) -> str:
        rows = (
            f"{d:14} {f:12} {n:5} steps   worst error {self._worst[d, f]:.1e}" for (d, f), n in self._counts.items()
        )
        return "\n".join(rows)


def run(case: Case, count: int, first_seed: int, report: Report) -> None:
    @seed(first_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(step=steps(SHAPE))
    def each(step: Step) -> None:
        error = check(case, step)
        report.add(case, step, error)
        assert error < TOLERANCE[case.dtype], f"{error} with {case} and {step}"

    began = time.monotonic()
    each()
    print(f"{case}: {count} steps in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default=",".join(TOLERANCE))
    parser.add_argument("--steps", type=int, default=115, help="per program; each dtype has five")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = Report()
    for dtype in options.dtypes.split(","):
        for number, shape in enumerate(SHAPES):
            run(replace(shape, dtype=dtype), options.steps, options.seed + number, report)
    print(report)


if __name__ == "__main__":
    main()
