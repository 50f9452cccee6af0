"""Prefill and decode pools in virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.cli.simulate import simulate_command

ALONE = ("--requests=1", "--prompt_tokens=1000", "--output_tokens=11", "--routing_policy=prefix")
STEP_MS, PREFILL_MS, TRANSFER_MS, LATENCY_MS = 20.0, 50.0, 131.072, 5.0
"""Of 1000 tokens with the default speeds, at 1 GB/s."""


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert simulate_command([*flags, "--json"]) == 0
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return reports[0]


def test_a_prompt_s_way_through_both_pools_takes_the_sum_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, *ALONE, "--disagg_topo=1,1", "--transfer_gb_per_s=1")
    parts = LATENCY_MS + STEP_MS + PREFILL_MS + TRANSFER_MS + LATENCY_MS
    assert report["ttft"]["p50"] == pytest.approx(parts, abs=0.01)
    assert report["tpot"]["p50"] == pytest.approx(STEP_MS, rel=0.01)
    assert report["output_tokens"] == 11


def test_transfer_overlaps_the_chunks_of_a_long_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = ("--prefill_max_num_batched_tokens=250", "--disagg_topo=1,1", "--transfer_gb_per_s=2")
    report = run(capsys, *ALONE, *chunks)
    computing = LATENCY_MS + 4 * STEP_MS + PREFILL_MS
    last_chunk = TRANSFER_MS / 2 / 4
    assert report["ttft"]["p50"] == pytest.approx(computing + last_chunk + LATENCY_MS, abs=0.01)


def test_short_prompts_stay_at_the_decode_replica(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, *ALONE, "--disagg_topo=1,1", "--disagg_min_prefill_tokens=1001")
    assert report["ttft"]["p50"] == pytest.approx(STEP_MS + PREFILL_MS)
    prefill, decode = report["pools"]
    assert (prefill["utilization"], decode["name"]) == (0.0, "decode")


def test_decoding_does_not_feel_other_requests_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--requests=120", "--rate=8", "--prompt_tokens=1500", "--output_tokens=60", "--routing_policy=prefix")
    unified = run(capsys, *load, "--data_parallel_size=3")
    pools = run(capsys, *load, "--disagg_topo=2,1", "--transfer_gb_per_s=20")
    assert pools["tpot"]["p99"] < 21 < unified["tpot"]["p99"]
    assert pools["output_tokens"] == unified["output_tokens"] == 120 * 60


def test_requests_go_on_when_prefill_and_decode_replicas_fail(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--requests=150", "--rate=15", "--prompt_tokens=exponential:900", "--output_tokens=30")
    report = run(capsys, *load, "--disagg_topo=2,2", "--failures_s=3", "--startup_s=1", "--routing_policy=prefix")
    assert all(pool["failures"] for pool in report["pools"])
    assert report["output_tokens"] == 150 * 30


def test_the_pools_scale_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    load = (
        "--requests=400",
        "--rate=20",
        "--prompt_tokens=2000",
        "--output_tokens=20",
        "--routing_policy=least_loaded",
    )
    report = run(capsys, *load, "--disagg_topo=1,1", "--prefill_max_replicas=6", "--max_replicas=2", "--startup_s=2")
    prefill, decode = report["pools"]
    assert prefill["replicas_most"] >= 3 > decode["replicas_most"]
