"""How far `sliceserve plan` is from published figures: the table of docs/plan.md, and the fit of its efficiencies.

    python -m bench.plan_error          the table, in Markdown
    python -m bench.plan_error --fit    fits the efficiencies to the figures marked as fitted, and shows the errors

The matrix units' efficiency comes from times to first token of prompts that all arrive at once; the memory's and the
fixed time of a step from throughputs. The links' efficiency and a collective's start are assumed: no figure here is
bound by them, so the data can't tell.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from scipy.optimize import brentq, least_squares

from cluster.plan.calibration import EXPECTED
from cluster.plan.published import BURSTS, FIGURES, compare, performance_of
from cluster.plan.published_table import comparison_table
from cluster.plan.roofline import Efficiency


def fit() -> Efficiency:
    """Least squares of the logarithms; each server counts the same, however many figures it published."""
    efficiency = replace(EXPECTED, mxu=_fit_prefill())
    fitted = [figure for figure in FIGURES if figure.fitted]
    weights = [1 / math.sqrt(sum(other.source == figure.source for other in fitted)) for figure in fitted]

    def residuals(values: tuple[float, float]) -> list[float]:
        tried = replace(efficiency, hbm=float(values[0]), step_s=float(values[1]))
        return [
            weight * math.log(performance_of(figure, tried).output_tokens_per_s / figure.output_tokens_per_s)
            for figure, weight in zip(fitted, weights, strict=True)
        ]

    found = least_squares(residuals, (0.6, 1e-3), bounds=((0.1, 0.0), (1.0, 0.01)), x_scale=(0.6, 1e-3)).x
    return replace(efficiency, hbm=float(found[0]), step_s=float(found[1]))


def _fit_prefill() -> float:
    (burst,) = (burst for burst in BURSTS if burst.fitted)
    return float(brentq(lambda mxu: burst.expected_prompt_s(replace(EXPECTED, mxu=mxu)) - burst.prompt_s, 0.01, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies anew")
    efficiency = EXPECTED
    if parser.parse_args().fit:
        efficiency = fit()
        print(efficiency, end="\n\n")
    print(comparison_table(compare(efficiency), markdown=True))
    print("\nOne prompt's prefill, measured and expected:")
    for burst in BURSTS:
        expected = burst.expected_prompt_s(efficiency)
        print(
            f"- {burst.model}, {burst.input_tokens} tokens, {burst.topology}: {burst.prompt_s * 1e3:.0f} ms, "
            f"expected {expected * 1e3:.0f} ms ({expected / burst.prompt_s - 1:+.0%}){', fit' if burst.fitted else ''}"
        )


if __name__ == "__main__":
    main()
