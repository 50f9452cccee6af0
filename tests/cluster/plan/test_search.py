"""The search finds what a look at all single plans finds."""

from __future__ import annotations

import time

import pytest

from cluster.plan.errors import PlanError
from cluster.plan.search import SearchSpace, search
from cluster.plan.workload import Slo, Workload
from cluster.topology import tpu_slices
from tests.cluster.plan.requests import PRICES, plan, request

WORKLOAD = Workload(input_tokens=1000, output_tokens=1000, concurrency=64)


def space(model: str = "meta-llama/Llama-3.1-8B", max_chips: int = 16, generation: str | None = None) -> SearchSpace:
    return SearchSpace(
        request=request(model, "v5e:8x8", workload=WORKLOAD),
        slices=tuple(s for s in tpu_slices(generation) if s.num_chips <= max_chips),
        quantizations=(None, "int8"),
        max_chips=max_chips,
    )


def test_the_first_is_the_cheapest_and_all_keep_the_slo() -> None:
    found = search(space(), Slo(ttft_s=1.0, tpot_s=0.03), PRICES, "cost")
    costs = [candidate.usd_per_million for candidate in found]
    known = [cost for cost in costs if cost is not None]
    assert known == sorted(known)
    assert costs[len(known) :] == [None] * (len(costs) - len(known))  # tpu7x has no price
    for candidate in found:
        assert candidate.plan.memory.fits
        assert candidate.chips <= 16
        assert candidate.meets(Slo(ttft_s=1.0, tpot_s=0.03))


def test_no_single_plan_is_cheaper_than_what_the_search_finds() -> None:
    best = search(space(), Slo(), PRICES, "cost")[0].usd_per_million
    assert best is not None
    for chosen in tpu_slices():
        if chosen.num_chips > 16:
            continue
        for quantization in (None, "int8"):
            single = plan("meta-llama/Llama-3.1-8B", chosen.name, quantization=quantization, workload=WORKLOAD)
            if single.performance is not None:
                cost = single.usd_per_million(single.performance.expected)
                assert cost is None or cost >= best * 0.999


def test_throughput_ranks_by_tokens_a_second() -> None:
    rates = [candidate.output_tokens_per_s for candidate in search(space(), Slo(), PRICES, "throughput")]
    assert rates == sorted(rates, reverse=True)


def test_a_tight_slo_costs_more() -> None:
    loose = search(space(), Slo(), PRICES, "cost")[0].usd_per_million
    tight = search(space(), Slo(tpot_s=0.006), PRICES, "cost")[0].usd_per_million
    assert loose is not None
    assert tight is not None
    assert tight > loose


def test_what_can_not_be_kept_is_said_with_what_can() -> None:
    with pytest.raises(PlanError, match=r"the least that can be had is TPOT \d+\.\d ms"):
        search(space(), Slo(tpot_s=1e-4), PRICES, "cost")


def test_a_model_that_fits_nowhere() -> None:
    with pytest.raises(PlanError, match="fits on none of 2 slices"):
        search(space("meta-llama/Llama-3.1-70B", max_chips=4, generation="v5e"), Slo(), PRICES, "cost")


def test_seventy_billion_over_everything_takes_seconds() -> None:
    started = time.monotonic()
    assert search(space("meta-llama/Llama-3.1-70B", max_chips=64), Slo(), PRICES, "cost")
    assert time.monotonic() - started < 30
