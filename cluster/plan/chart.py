"""A plan as a picture: memory, roofline, and throughput against latency. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.plan.errors import PlanError
from cluster.plan.estimate import Performance
from cluster.plan.planner import Plan, make_plan
from cluster.plan.prices import Prices
from engine.config import GIB

_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_COLORS = {
    "weights": "#3b6fb6",
    "KV cache": "#e08a3c",
    "tables": "#8f8f8f",
    "temporaries": "#b5485d",
    "free": "#e6e6e6",
}
_RESOURCES = {"HBM": "#3b6fb6", "MXU": "#e08a3c", "ICI": "#4f9d69"}


def check_chart(path: Path) -> None:
    """Finds out before the planning whether a picture can be drawn.

    Raises:
        PlanError: not a name for a PNG file, or matplotlib is missing.
    """
    if path.suffix != ".png" or path.is_dir():
        raise PlanError(f"--chart={path}: use a name that ends in .png")
    if not path.absolute().parent.is_dir():
        raise PlanError(f"--chart={path}: no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlanError("--chart needs matplotlib; install it with: pip install matplotlib") from None


def write_chart(path: Path, plan: Plan, prices: Prices, title: str) -> None:
    """Draws the plan into a PNG file.

    Raises:
        PlanError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    figure.suptitle(title)
    memory, roofline, curve = figure.subplots(1, 3, width_ratios=(0.9, 1, 1.7))
    _draw_memory(memory, plan)
    _draw_roofline(roofline, plan)
    _draw_curve(curve, plan, prices)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise PlanError(f"--chart={path} can't be written: {error.strerror}") from None


def _draw_memory(axes: Any, plan: Plan) -> None:
    memory = plan.memory
    sizes = {
        "weights": memory.weight_bytes,
        "KV cache": memory.kv_bytes,
        "tables": memory.other_bytes,
        "temporaries": memory.temporary_bytes,
    }
    sizes["free"] = max(0, memory.usable_bytes - sum(sizes.values()))
    bottom = 0.0
    for name, size in sizes.items():
        height = size / GIB
        axes.bar([0], [height], bottom=bottom, color=_COLORS[name], label=f"{name} {height:.2f}", width=0.8)
        bottom += height
    budget = memory.budget_bytes / GIB
    axes.axhline(budget, color="black", linestyle="--", linewidth=1, label=f"budget {budget:.2f}")
    axes.set_xlim(-0.5, 2.1)
    axes.set_xticks([])
    axes.set_ylabel("GiB per device")
    axes.set_title("memory")
    axes.legend(loc="center right", fontsize=8, frameon=False, reverse=True)


def _draw_roofline(axes: Any, plan: Plan) -> None:
    assert plan.performance is not None
    decode, prefill = plan.performance.decode, plan.performance.prefill
    labels = [f"decode\n{decode.rows} rows", f"prefill\n{prefill.tokens} tokens"]
    for offset, (name, color) in enumerate(_RESOURCES.items()):
        values = [getattr(step.time, f"{name.lower()}_s") * 1e3 for step in (decode, prefill)]
        bars = axes.bar([i + (offset - 1) * 0.26 for i in range(2)], values, width=0.24, color=color, label=name)
        axes.bar_label(bars, labels=[f"{value:.1f}" if value else "" for value in values], fontsize=8)
    axes.set_xticks(range(2), labels)
    axes.set_ylabel("ms at the peak")
    axes.set_title("roofline of a step")
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _draw_curve(axes: Any, plan: Plan, prices: Prices) -> None:
    points = _sweep(plan, prices)
    for name, style, index in (("bound", "--", 0), ("expected", "-", 1)):
        performances: Sequence[Performance] = [pair[index] for _, pair in points]
        x = [performance.tpot_s * 1e3 for performance in performances]
        y = [performance.output_tokens_per_s for performance in performances]
        axes.plot(x, y, style, marker="o", markersize=4, label=name, color="#3b6fb6" if index else "#8f8f8f")
        for (concurrency, _), left, height in zip(points, x, y, strict=True):
            axes.annotate(str(concurrency), (left, height), xytext=(5, -9), textcoords="offset points", fontsize=7.5)
    axes.margins(x=0.09, y=0.07)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.yaxis.set_major_formatter("{x:g}")
    workload = plan.request.workload
    axes.set_title(f"{workload.input_tokens} tokens in, {workload.output_tokens} out; numbers: requests at a time")
    axes.set_xlabel("time per output token, ms")
    axes.set_ylabel("output tokens/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper left", fontsize=8)


def _sweep(plan: Plan, prices: Prices) -> list[tuple[int, tuple[Performance, Performance]]]:
    """Bound and expectation over the number of requests that run at once, until there is room for no more."""
    points: dict[int, tuple[Performance, Performance]] = {}
    for concurrency in _CONCURRENCIES:
        workload = replace(plan.request.workload, concurrency=concurrency)
        there = make_plan(replace(plan.request, workload=workload), prices, plan.programs).performance
        assert there is not None
        room = there.bound.running * plan.request.data_parallel * (plan.request.decode_slices or 1)
        points.setdefault(min(concurrency, room), (there.bound, there.expected))
        if room < concurrency:
            break
    return sorted(points.items())
