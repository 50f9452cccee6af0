"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.plan.arguments import server_arguments
from cluster.plan.calibration import TYPICAL_ERROR
from cluster.plan.notes import notes_on
from cluster.plan.planner import PerformancePlan, Plan, StepReport
from cluster.plan.prices import Prices
from cluster.topology import NeuronInstance, TpuSlice
from engine.config import GIB

LEGEND = (
    "bound: these programs can't be faster on this hardware. expected: what other TPU servers reach of their bounds,",
    f"typically right within {TYPICAL_ERROR:.0%} (docs/plan.md); this server has not been measured on a TPU yet.",
)


def plan_text(plan: Plan, prices: Prices) -> str:
    """The whole report."""
    lines = [heading(plan), "", *_memory(plan), "", *_capacity(plan)]
    if plan.performance is not None:
        lines += ["", *_roofline(plan.performance), "", *_numbers(plan, plan.performance), *LEGEND]
        lines.append(f"prices: {prices.source}")
    lines += ["", *(f"note: {note}" for note in notes_on(plan))] if notes_on(plan) else []
    lines += ["", *argument_lines(plan)]
    return "\n".join(lines)


def heading(plan: Plan) -> str:
    request, programs = plan.request, plan.programs
    parts = [
        _place(request.topology),
        f"TP {request.tensor_parallel}" + (f" x DP {request.data_parallel}" if request.data_parallel > 1 else ""),
        f"{request.quantization} weights" if request.quantization else "bfloat16",
        f"{programs.num_programs} programs compiled in {programs.compile_seconds:.0f} s"
        if programs.num_programs
        else "by formula",
    ]
    return f"{request.model_name} on {request.topology.name}: {', '.join(parts)}"


def argument_lines(plan: Plan) -> list[str]:
    """The command, in lines that can be pasted."""
    arguments = server_arguments(plan)
    lines = [f"server: {arguments.command}"]
    if arguments.pending:
        lines.append(f"also part of this plan, but not available in the server yet: {' '.join(arguments.pending)}")
    return lines


def columns(rows: Sequence[Sequence[str]], *, left: int = 1, indent: str = "") -> list[str]:
    """Aligned columns, the first `left` of them to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent
        + "  ".join(
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def dollars(amount: float | None) -> str:
    return "?" if amount is None else f"{amount:.3f}" if amount < 10 else f"{amount:.2f}"


def _place(topology: TpuSlice | NeuronInstance) -> str:
    if isinstance(topology, NeuronInstance):
        return f"{topology.chips} chips, {topology.num_devices} NeuronCores"
    hosts = f"{topology.num_hosts} host{'s' if topology.num_hosts > 1 else ''} ({topology.gke_machine_type})"
    devices = f" ({topology.num_devices} devices)" if topology.num_devices != topology.num_chips else ""
    return f"{topology.num_chips} chip{'s' if topology.num_chips > 1 else ''}{devices}, {hosts}"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    taken = memory.weight_bytes + memory.kv_bytes + memory.other_bytes + memory.temporary_bytes
    parts = (
        ("weights", memory.weight_bytes),
        ("KV cache", memory.kv_bytes),
        ("history and tables", memory.other_bytes),
        ("temporaries", memory.temporary_bytes),
        ("free", max(0, memory.usable_bytes - taken)),
    )
    rows = [("memory per device", "GiB", f"of {memory.usable_bytes / GIB:.2f}")]
    rows += [(f"  {name}", f"{size / GIB:.2f}", f"{size / memory.usable_bytes:.0%}") for name, size in parts]
    yield from columns(rows)
    if not memory.fits:
        yield f"  does not fit: {memory.missing_bytes / GIB:.2f} GiB too little"


def _capacity(plan: Plan) -> Iterator[str]:
    memory, request = plan.memory, plan.request
    groups = request.data_parallel
    times = f" ({memory.kv_tokens} in each of {groups} groups)" if groups > 1 else ""
    rows = [
        ("fits", "yes" if memory.fits else "no"),
        ("KV cache", f"{memory.kv_tokens * groups} tokens{times}"),
        ("sequences", f"{memory.kv_sequences * groups} of {memory.max_model_len} tokens"),
        ("largest safe hbm_utilization_factor", f"{memory.safe_factor:.2f}"),
        (
            "largest safe max_running_seqs",
            f"{memory.safe_rows(request.workload)} of {request.workload.tokens} tokens"
            + (" per group" if groups > 1 else ""),
        ),
    ]
    yield from columns(rows, left=2)


def _roofline(performance: PerformancePlan) -> list[str]:
    head = ("one step on one device", "HBM GB", "of minimum", "ms", "TFLOP", "ms", "ICI GB", "ms", "limit")
    decode, prefill = performance.decode, performance.prefill
    rows = [
        head,
        _step(f"  decode, {decode.rows} rows of {decode.context:.0f} tokens", decode),
        _step(f"  prefill, {prefill.tokens} tokens", prefill),
    ]
    return columns(rows)


def _step(name: str, step: StepReport) -> tuple[str, ...]:
    cost, time = step.cost, step.time
    return (
        name,
        f"{cost.hbm_bytes / 1e9:.2f}",
        f"{cost.hbm_bytes / step.minimum.hbm_bytes:.0%}",
        f"{time.hbm_s * 1e3:.2f}",
        f"{cost.flops / 1e12:.2f}",
        f"{time.mxu_s * 1e3:.2f}",
        f"{cost.ici_bytes / 1e9:.2f}",
        f"{time.ici_s * 1e3:.2f}",
        time.limit,
    )


def _numbers(plan: Plan, performance: PerformancePlan) -> list[str]:
    both = (performance.bound, performance.expected)
    price = "price unknown" if plan.usd_per_hour is None else f"${plan.usd_per_hour:.2f} an hour"
    rows = [
        (str(plan.request.workload), "bound", "expected"),
        ("  output tokens/s", *(f"{p.output_tokens_per_s:.0f}" for p in both)),
        ("  TTFT, ms", *(f"{p.ttft_s * 1e3:.0f}" for p in both)),
        ("  TPOT, ms", *(f"{p.tpot_s * 1e3:.1f}" for p in both)),
        (f"  $ per million output tokens ({price})", *(dollars(plan.usd_per_million(p)) for p in both)),
    ]
    return columns(rows)
