"""`sliceserve simulate`: whole simulations, small ones, and what is said about wrong command lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.simulate import simulate_command

SMALL = ("--requests=150", "--rate=30", "--prompt_tokens=exponential:150", "--output_tokens=20")


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert simulate_command([*SMALL, "--json", *flags]) == 0
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return reports


def test_policies_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--data_parallel_size=4",
        "--prefix_groups=12",
        "--prefix_tokens=1500",
        "--slo_ttft_ms=80",
        "--num_blocks=400",
    )
    prefix, loaded, turns = run(capsys, *flags, "--routing_policy=prefix,least_loaded,round_robin")
    assert {report["prompt_tokens"] for report in (prefix, loaded, turns)} == {prefix["prompt_tokens"]}
    assert all(report["requests"] == 150 and report["refused"] == 0 for report in (prefix, loaded, turns))
    assert all(report["output_tokens"] == 150 * 20 for report in (prefix, loaded, turns))
    assert prefix["pools"][0]["prefix_hit_rate"] > 1.3 * turns["pools"][0]["prefix_hit_rate"]
    assert prefix["ttft"]["p50"] < turns["ttft"]["p50"]
    assert prefix["good_share"] > turns["good_share"]


def test_the_same_seed_gives_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data_parallel_size=3", "--num_ingress_replicas=2", "--failures_s=8", "--startup_s=1", "--seed=5")
    assert run(capsys, *flags) == run(capsys, *flags)


def test_nothing_is_lost_when_replicas_fail(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run(capsys, "--data_parallel_size=4", "--failures_s=4", "--startup_s=1", "--routing_policy=prefix")
    assert report["pools"][0]["failures"] > 1
    assert report["pools"][0]["resumed"] > 0
    assert report["output_tokens"] == 150 * 20


def test_requests_that_lose_engine_after_engine_are_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run(capsys, "--requests=40", "--failures_s=1", "--output_tokens=2000", "--routing_policy=prefix")
    assert report["refused"] == report["requests"] == 40
    assert report["pools"][0]["utilization"] <= 1
    assert simulate_command(["--requests=5", "--failures_s=1", "--output_tokens=2000", "--routing_policy=prefix"]) == 0
    assert "nan" not in capsys.readouterr().out


def test_what_engines_log_is_not_shown(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    run(capsys, "--disagg_topo=2,2", "--failures_s=3", "--startup_s=1", "--routing_policy=prefix")
    assert not caplog.records


def test_replicas_are_added_for_a_load_and_stopped_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--max_replicas=6", "--max_decode_seqs=16", "--startup_s=2", "--routing_policy=least_loaded")
    (report,) = run(capsys, *flags, "--arrival=bursty", "--rate=40", "--requests=600", "--slo_ttft_ms=300")
    pool = report["pools"][0]
    assert pool["replicas_most"] > 2
    assert report["output_tokens"] == 600 * 20


def test_a_slice_s_roofline_gives_the_times_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run(capsys, "--model=llama-3.1-8b", "--topology=v5e:2x4", "--routing_policy=prefix", "--rate=5")
    assert 4 < report["tpot"]["p50"] < 40
    assert report["ttft"]["p50"] > report["tpot"]["p50"]


def test_whoever_plays_a_trace_hears_what_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,prompt_tokens,output_tokens\n0,100,10\n1,9000,10\n2,8000,900\n")
    assert simulate_command([f"--trace={trace}", "--routing_policy=prefix"]) == 0
    assert capsys.readouterr().err == "note: 2 requests of the trace are cut to 8192 tokens\n"
    assert simulate_command([f"--trace={trace}", "--max_model_len=9010", "--routing_policy=prefix"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate=0"], "--rate: 0 is not a number above 0"),
        (["--requests=ten"], "--requests: ten is not a whole number"),
        (["--routing_policy=best"], "no policy 'best'; use some of prefix"),
        (["--trace=nothing.csv"], "No such file"),
        (["--trace=x", "--rate=3"], "--rate is about synthetic load"),
        (["--trace_speed=2"], "--trace_speed is about a trace"),
        (["--model=llama-3.1-8b"], "--model and --topology go together"),
        (["--model=llama-3.1-8b", "--topology=v5e:9x9"], "v5e:9x9"),
        (["--model=llama-3.1-8b", "--topology=v5e:1x1"], "does not fit"),
        (["--tensor_parallel_size=2"], "--tensor_parallel_size needs --model and --topology"),
        (["--model=a", "--topology=v5e:2x2", "--mock_step_ms=3"], "--mock_step_ms is about engines without --model"),
        (["--mock_step_ms=0"], "a step must take some time"),
        (["--prefix_groups=3"], "--prefix_groups and --prefix_tokens go together"),
        (["--prefix_groups=3", "--prefix_tokens=9000"], "leaves no room in sequences of 8192 tokens"),
        (["--burstiness=2"], "needs --arrival=bursty"),
        (["--think_s=2"], "needs --turns of 2 or more"),
        (["--max_replicas=2", "--min_replicas=3"], "min_replicas=3 is more than max_replicas=2"),
        (["--failures_s=0.5"], "--failures_s: 0.5 is not a number of seconds, 1 or more"),
        (["--startup_s=3"], "--startup_s is about replicas that start later"),
        (["--transfer_ms=3"], "--transfer_ms is about prefill and decode pools"),
        (["--disagg_topo=1"], "give prefill and decode replicas as P,D"),
        (["--max_model_len=0"], "max_model_len"),
        (["--thinks=3"], "did you mean --think_s?"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate_command(flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("sliceserve simulate: ")
    assert error.count("\n") == 1
