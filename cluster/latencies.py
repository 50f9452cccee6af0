"""Latency statistics, and the tables that `sliceserve bench` and `sliceserve simulate` show them in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Of a latency, in milliseconds; not a number where there was nothing to measure."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Statistics:
        ordered = sorted(1e3 * value for value in seconds)
        if not ordered:
            return cls(mean=math.nan, p50=math.nan, p95=math.nan, p99=math.nan)
        p50, p95, p99 = (_percentile(ordered, share) for share in (0.50, 0.95, 0.99))
        return cls(mean=sum(ordered) / len(ordered), p50=p50, p95=p95, p99=p99)

    def to_json(self) -> dict[str, float | None]:
        """Null in place of what is not a number."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    def cells(self) -> list[str]:
        """Of a table's row, below "mean", "p50", "p95", "p99"."""
        return ["-" if value is None else f"{value:.2f}" for value in self.to_json().values()]


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in right-aligned columns; the first one is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks, as numpy does by default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
