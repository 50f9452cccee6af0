"""The comparison with published figures as a table, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.plan.published import Comparison

_HEADINGS = (
    ("server", "<"),
    ("model", "<"),
    ("slice", "<"),
    ("in/out", ">"),
    ("at once", ">"),
    ("measured", ">"),
    ("bound", ">"),
    ("of bound", ">"),
    ("expected", ">"),
    ("error", ">"),
    ("", "<"),
)


def comparison_table(comparisons: Sequence[Comparison], *, markdown: bool = False) -> str:
    """Output tokens/s measured, the bound, the expectation. "fit": the efficiencies were fitted to it."""
    rows = [[heading for heading, _ in _HEADINGS], *(_row(comparison) for comparison in comparisons)]
    if markdown:
        rule = ["---:" if side == ">" else "---" for _, side in _HEADINGS]
        return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    sides = [side for _, side in _HEADINGS]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(comparison: Comparison) -> list[str]:
    figure = comparison.figure
    model = f"{figure.model} int8" if figure.quantization else figure.model
    return [
        figure.source,
        model,
        figure.topology,
        f"{figure.workload.input_tokens}/{figure.workload.output_tokens}",
        str(figure.workload.concurrency),
        f"{figure.output_tokens_per_s:.0f}",
        f"{comparison.bound.output_tokens_per_s:.0f}",
        f"{comparison.of_bound:.0%}",
        f"{comparison.expected.output_tokens_per_s:.0f}",
        f"{comparison.error:+.0%}",
        "fit" if figure.fitted else "",
    ]
