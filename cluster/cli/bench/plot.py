"""A picture of a bench run: throughput and latency over the load levels. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.cli.bench.report import LevelReport

FORMATS = (".png", ".svg", ".html")


class PlotError(RuntimeError):
    """No picture. The message is one line."""


def check_plot(path: Path) -> None:
    """Finds out before the load runs whether the picture can be drawn.

    Raises:
        PlotError: an unknown file type, or matplotlib is missing.
    """
    if path.suffix not in FORMATS:
        raise PlotError(f"--plot={path}: use a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("--plot needs matplotlib; install it with: pip install matplotlib") from None


def write_plot(path: Path, reports: Sequence[LevelReport], *, title: str, table: str) -> None:
    """Draws the run. HTML holds the picture and the table and needs nothing else."""
    figure = _figure(reports, title)
    if path.suffix != ".html":
        figure.savefig(path, dpi=120)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"{svg[svg.index('<svg') :]}<pre>{html.escape(table)}</pre>\n",
        encoding="utf-8",
    )


def _figure(reports: Sequence[LevelReport], title: str) -> Any:
    from matplotlib.figure import Figure

    levels = [report.level for report in reports]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    throughput = axes[0][0]
    throughput.bar(levels, [report.output_tokens_per_s for report in reports], color="tab:blue")
    throughput.set_title("output tokens/s")
    for axis, metric in ((axes[0][1], "ttft"), (axes[1][0], "tpot"), (axes[1][1], "e2e")):
        for statistic in ("p50", "p95", "p99"):
            axis.plot(
                levels, [getattr(getattr(report, metric), statistic) for report in reports], "o-", label=statistic
            )
        axis.set_title(f"{metric.upper()} (ms)")
        axis.set_ylim(bottom=0)
        axis.legend()
    for axis in axes.flat:
        axis.set_xlabel("load (requests at a time, or a second)")
        axis.grid(axis="y", alpha=0.3)
    return figure
