"""What is simulated: synthetic requests and those of trace files."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.simulate.distributions import Distribution
from cluster.simulate.engine import SAMPLED
from cluster.simulate.errors import SimulationError
from cluster.simulate.trace import TraceWorkload, read_trace
from cluster.simulate.workload import Job, Shape, SyntheticWorkload


def jobs(count: int, *, seed: int = 0, **options: Any) -> list[Job]:
    return list(islice(SyntheticWorkload(Shape(rate=100.0, **options), seed).jobs(), count))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_the_same_seed_gives_the_same_requests() -> None:
    options = {"prompt_tokens": Distribution.parse("prompt_tokens", "lognormal:64,0.5"), "arrival": "bursty"}
    first, again, other = (jobs(50, seed=seed, **options) for seed in (1, 1, 2))
    assert [(job.time_s, job.prompt) for job in first] == [(job.time_s, job.prompt) for job in again]
    assert [job.prompt for job in first] != [job.prompt for job in other]


@pytest.mark.parametrize(("arrival", "variation"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 3.0)])
def test_requests_come_at_the_rate_that_was_asked_for(arrival: str, variation: float) -> None:
    times = [job.time_s for job in jobs(20_000, arrival=arrival, prompt_tokens=Distribution("constant", 1))]
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("text", ["300", "uniform:100-500", "exponential:300", "lognormal:300,0.8"])
def test_lengths_have_the_mean_that_was_asked_for(text: str) -> None:
    distribution, rng = Distribution.parse("prompt_tokens", text), random.Random(0)
    lengths = [distribution.draw(rng) for _ in range(20_000)]
    assert min(lengths) >= 1
    assert statistics.mean(lengths) == pytest.approx(300, rel=0.03) == distribution.mean


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "many", "uniform:5", "uniform:9-2", "normal:3,2", "lognormal:3,x", "nan"]
)
def test_lengths_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(SimulationError, match=r"--prompt_tokens=.*: write it like 512"):
        Distribution.parse("prompt_tokens", text)


def test_groups_share_prefixes_and_some_are_more_popular() -> None:
    prompts = [job.prompt for job in jobs(400, prefix_groups=4, prefix_tokens=40, prefix_skew=1.5)]
    counts = sorted(Counter(prompt[:40] for prompt in prompts).values())
    assert len(counts) == 4
    assert counts[-1] > 3 * counts[0]
    assert len({prompt[40:] for prompt in prompts}) == 400


def test_a_turn_continues_what_was_said_before() -> None:
    (first,) = jobs(1, turns=2, output_tokens=Distribution("constant", 5))
    assert first.follow_up is not None
    second = first.follow_up(10.0)
    assert second is not None
    assert second.prompt[: len(first.prompt) + 5] == first.prompt + (SAMPLED,) * 5
    assert second.session == first.session
    assert second.time_s > 10.0
    assert second.follow_up is None


def test_conversations_end_where_the_context_does() -> None:
    (job,) = jobs(1, turns=1000, max_tokens=700, output_tokens=Distribution("constant", 50))
    turns = 0
    while True:
        assert len(job.prompt) + job.output_tokens <= 700
        following = job.follow_up(0.0) if job.follow_up else None
        if following is None:
            break
        job, turns = following, turns + 1
    assert 1 <= turns < 10


def test_azure_s_traces_can_be_read(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,9\n"
    rows = read_trace(written(tmp_path, text))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 9)]
    assert rows[1].time_s - rows[0].time_s == pytest.approx(4.30941)


def test_mooncake_s_traces_can_be_read_and_equal_hash_ids_are_equal_prefixes(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}',
        '{"timestamp": 3000, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]}',
    ]
    rows = read_trace(written(tmp_path, "\n".join(lines)))
    first, second = TraceWorkload(rows, speed=2.0, max_tokens=8192, seed=0).jobs()
    assert (first.time_s, second.time_s) == (0.0, 1.5)
    assert (len(first.prompt), len(second.prompt)) == (1200, 1100)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1100] != second.prompt[1024:]


def test_sequences_of_a_trace_are_cut_to_what_the_engine_takes(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, '{"time_s": 1, "prompt_tokens": 500, "output_tokens": 500}'))
    workload = TraceWorkload(rows, speed=1.0, max_tokens=600, seed=0)
    (job,) = workload.jobs()
    assert (len(job.prompt), job.output_tokens, workload.num_cut) == (500, 100, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no requests"),
        ("time_s,prompt_tokens\n1,5\n", "line 2: no output tokens; name the column"),
        ("time_s,prompt_tokens,output_tokens\nsoon,5,5\n", "line 2: time_s='soon' is not a time"),
        ("prompt_tokens,output_tokens\n5,5\n", "line 2: no time"),
        ('{"time_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 1: prompt_tokens=0 is not a whole number"),
        ('{"time_s": 1e99, "prompt_tokens": 3, "output_tokens": 1}', "is not a time"),
        ('{"time_s": 1, "prompt_tokens": 3, "output_tokens": 1, "hash_ids": "x"}', "hash_ids is not a list"),
        ('{"time_s": 1,', "line 1: not JSON"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SimulationError) as caught:
        read_trace(written(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="No such file"):
        read_trace(tmp_path / "nothing")
