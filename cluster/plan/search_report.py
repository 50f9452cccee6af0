"""What a search found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.plan.calibration import TYPICAL_ERROR
from cluster.plan.planner import Plan
from cluster.plan.prices import Prices
from cluster.plan.report import to_json
from cluster.plan.search import Candidate
from cluster.plan.table import argument_lines, columns, dollars
from cluster.plan.workload import Workload

_HEAD = ("", "slices", "chips", "weights", "TP", "DP", "P,D", "$/h", "tokens/s", "TTFT ms", "TPOT ms", "$/M", "from")


def search_text(candidates: Sequence[Candidate], workload: Workload, prices: Prices) -> str:
    """A table of the candidates, and how to start the first."""
    rows = [_HEAD, *(_row(place, candidate) for place, candidate in enumerate(candidates, start=1))]
    best = candidates[0]
    lines = [f"{best.plan.request.model_name}, {workload}: best first", "", *columns(rows, left=2), ""]
    lines.append(
        "expected values, typically right within "
        f"{TYPICAL_ERROR:.0%}; $/M: dollars per million output tokens, the prompts paid with them"
    )
    lines.append(f"prices: {prices.source}")
    lines += ["", f"the first, on {_slices(best)}:", *argument_lines(best.plan)]
    if best.replicas > 1:
        lines.append(f"{best.replicas} such deployments behind one router are not available yet: run them separately")
    return "\n".join(lines)


def search_json(candidates: Sequence[Candidate], prices: Prices) -> dict[str, Any]:
    """`candidates`: plans as of `sliceserve plan --json`, with `replicas`, `chips` and sums over all replicas."""
    return {"candidates": [_to_json(candidate, prices) for candidate in candidates]}


def _to_json(candidate: Candidate, prices: Prices) -> dict[str, Any]:
    cost = candidate.usd_per_million
    return {
        "replicas": candidate.replicas,
        "chips": candidate.chips,
        "usd_per_hour": candidate.usd_per_hour,
        "output_tokens_per_s": round(candidate.output_tokens_per_s, 1),
        "usd_per_million_output_tokens": None if cost is None else round(cost, 4),
        "plan": to_json(candidate.plan, prices),
    }


def _row(place: int, candidate: Candidate) -> tuple[str, ...]:
    plan: Plan = candidate.plan
    request = plan.request
    assert plan.performance is not None
    expected = plan.performance.expected
    return (
        f"{place}.",
        _slices(candidate),
        str(candidate.chips),
        request.quantization or "bf16",
        str(request.tensor_parallel),
        str(request.data_parallel),
        f"{request.prefill_slices},{request.decode_slices}" if request.prefill_slices else "",
        "?" if candidate.usd_per_hour is None else f"{candidate.usd_per_hour:.2f}",
        f"{candidate.output_tokens_per_s:.0f}",
        f"{expected.ttft_s * 1e3:.0f}",
        f"{expected.tpot_s * 1e3:.1f}",
        dollars(candidate.usd_per_million),
        plan.programs.source,
    )


def _slices(candidate: Candidate) -> str:
    count = candidate.plan.request.num_slices * candidate.replicas
    return candidate.plan.request.topology.name + (f" x{count}" if count > 1 else "")
