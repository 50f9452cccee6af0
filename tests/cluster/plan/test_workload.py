"""Workloads, limits and prices as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.plan.errors import PlanError
from cluster.plan.prices import load_prices
from cluster.plan.workload import Slo, Workload
from cluster.topology import find_topology


def test_a_workload() -> None:
    workload = Workload.parse("in=1000, out=200 ,concurrency=1_000")
    assert workload == Workload(input_tokens=1000, output_tokens=200, concurrency=1000)
    assert workload.mean_context == 1100.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not key=value; write it like in=1000"),
        ("in=10", "out and concurrency missing"),
        ("in=10,out=20,concurency=3", "did you mean concurrency?"),
        ("in=0,out=20,concurrency=3", "in=0: use a whole number from 1"),
        ("in=1e3,out=20,concurrency=3", "in=1e3: use a whole number"),
        ("in=-5,out=20,concurrency=3", "use a whole number"),
        ("in=10,in=20,out=3,concurrency=3", "in is given twice"),
        ("in=9999999999999999,out=3,concurrency=3", "use a whole number"),
        ("in=١٢,out=3,concurrency=3", "use a whole number"),
    ],
)
def test_a_bad_workload_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Workload.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits() -> None:
    assert Slo.parse("ttft=500ms,tpot=0.05s") == Slo(ttft_s=0.5, tpot_s=0.05)
    assert Slo.parse("tpot=50") == Slo(tpot_s=0.05)
    assert Slo.parse("tpot=50").met_by(ttft_s=100, tpot_s=0.05)
    assert not Slo.parse("ttft=1s").met_by(ttft_s=1.1, tpot_s=0)


@pytest.mark.parametrize("text", ["ttft=soon", "ttft=0", "tpot=-5ms", "tpot=nan", "tpott=5", "ttft=infs"])
def test_a_bad_limit(text: str) -> None:
    with pytest.raises(PlanError, match="--slo"):
        Slo.parse(text)


def test_prices_of_a_file_replace_the_catalog_s(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("v6e: 1.9\ntpu7x: 10\ninf2.48xlarge: 8\n")
    prices = load_prices(file)
    assert prices.of(find_topology("v6e:2x4")) == pytest.approx(8 * 1.9)
    assert prices.of(find_topology("tpu7x:2x2x1")) == 40
    assert prices.of(find_topology("inf2.48xlarge")) == 8
    assert prices.of(find_topology("v5e:2x2")) == pytest.approx(4 * 1.2)
    assert "prices.yaml" in prices.source
    assert load_prices(None).of(find_topology("trn2.48xlarge")) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "not a mapping"),
        ("h100: 3", "'h100' has no price here"),
        ("v6e: much", "costs 'much'"),
        ("{", "can't be read"),
        ("v6e: 2025-99-99", "can't be read: month must be in 1..12"),
        ("[" * 3000, "can't be read: maximum recursion depth"),
    ],
)
def test_bad_prices(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(content)
    with pytest.raises(PlanError, match=says):
        load_prices(file)
