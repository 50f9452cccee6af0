from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from cluster.cli.bench.driver import Level, LevelResult, RequestRecord
from cluster.cli.bench.report import Objective, summarize
from cluster.cli.bench.stream import StreamReader
from cluster.cli.bench.workload import PromptShape, WorkloadError, jsonl_items, poisson_offsets, random_items
from cluster.cli.main import main
from cluster.latencies import Statistics
from tests.cluster.cli.fake_server import FakeServer


def bench(server: FakeServer, tmp_path: Path, *argv: str) -> tuple[int, dict[str, object]]:
    output = tmp_path / "bench.json"
    code = main(["bench", f"--url={server.url}", f"--json={output}", *argv])
    return code, json.loads(output.read_text())


def test_a_run_reports_exact_counts_per_level(server: FakeServer, tmp_path: Path) -> None:
    argv = ["--concurrency=1,4", "--requests=8", "--prompt_tokens=20", "--output_tokens=5", "--ignore_eos"]
    code, result = bench(server, tmp_path, *argv)
    assert code == 0
    assert result["model"] == "fake"
    for level, name in zip(result["levels"], ("1", "4"), strict=True):
        assert (level["level"], level["requests"], level["failed"]) == (name, 8, 0)
        assert (level["prompt_tokens"], level["output_tokens"], level["cached_tokens"]) == (160, 40, 256)
        assert level["e2e"]["p50"] >= level["ttft"]["p50"] > 0
    assert server.most_at_once == 4
    assert all(len(body["prompt"]) == 20 and body["ignore_eos"] and body["max_tokens"] == 5 for body in server.bodies)


def test_times_follow_the_server(server: FakeServer, tmp_path: Path) -> None:
    server.token_delay_s = 0.03
    _, result = bench(server, tmp_path, "--concurrency=2", "--requests=4", "--output_tokens=6", "--slo=ttft=10000")
    level = result["levels"][0]
    assert 28 <= level["ttft"]["p50"] < 500
    assert 28 <= level["tpot"]["mean"] < 200
    assert 28 <= level["itl"]["mean"] < 200
    assert level["good_share"] == 1.0


def test_poisson_arrivals_and_goodput(server: FakeServer, tmp_path: Path) -> None:
    argv = ["--rate=100", "--requests=20", "--output_tokens=2", "--slo=ttft=0.0001,e2e=1000"]
    code, result = bench(server, tmp_path, *argv)
    level = result["levels"][0]
    assert code == 0
    assert level["level"] == "100/s"
    assert level["goodput_per_s"] == 0
    assert level["duration_s"] > 0.05


def test_chat_with_text_prompts(server: FakeServer, tmp_path: Path) -> None:
    argv = ["--endpoint=chat", "--prompt_format=text", "--prompt_tokens=7", "--output_tokens=3", "--concurrency=1"]
    code, result = bench(server, tmp_path, *argv)
    assert code == 0
    assert result["levels"][0]["output_tokens"] == 12
    assert len(server.bodies[0]["messages"][0]["content"].split()) == 7


def test_a_dataset_is_sent_as_it_is(server: FakeServer, tmp_path: Path) -> None:
    dataset = tmp_path / "requests.jsonl"
    dataset.write_text(
        '{"prompt": "one two", "max_tokens": 2}\n\n{"messages": [{"role": "user", "content": "three"}]}\n'
    )
    argv = [
        f"--dataset={dataset}",
        "--endpoint=chat",
        "--concurrency=1",
        "--requests=2",
        "--warmup=0",
        "--output_tokens=4",
    ]
    code, result = bench(server, tmp_path, *argv)
    assert code == 0
    assert [body["messages"][0]["content"] for body in server.bodies] == ["one two", "three"]
    assert result["levels"][0]["output_tokens"] == 6


@pytest.mark.parametrize(
    ("failure", "message"),
    [("midway", "engine died"), ("cut", "without [DONE]")],
)
def test_failed_requests_are_counted_and_named(
    server: FakeServer, tmp_path: Path, failure: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failure = failure
    code, result = bench(server, tmp_path, "--concurrency=2", "--requests=4", "--warmup=0")
    assert code == 1
    assert result["levels"][0]["failed"] == 4
    assert result["levels"][0]["ttft"]["p50"] is None
    assert message in capsys.readouterr().err


def test_a_server_that_refuses_everything_ends_the_run_at_once(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failure = "status"
    assert main(["bench", f"--url={server.url}"]) == 1
    error = capsys.readouterr().err
    assert "HTTP 429" in error
    assert "queue is full" in error
    assert error.count("\n") == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url=http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("sliceserve bench: can't reach 127.0.0.1:9")


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots(server: FakeServer, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"plot.{suffix}"
    assert main(["bench", f"--url={server.url}", "--concurrency=1,2", "--requests=4", f"--plot={plot}"]) == 0
    assert plot.stat().st_size > 2000
    if suffix == "html":
        assert "output tokens/s" in plot.read_text() or "<svg" in plot.read_text()


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    shape = PromptShape(prompt_tokens=50, output_tokens=1, shared_prefix_tokens=30)
    first, second = (item.body["prompt"] for item in itertools.islice(random_items(shape, chat=False, seed=1), 2))
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]
    assert next(random_items(shape, chat=False, seed=1)).body["prompt"] == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no requests"),
        ("{", "line 1: not JSON"),
        ('{"prompt": "x"}\n[]', "line 2: needs a key"),
        ('{"messages": []}', "need --endpoint=chat"),
    ],
)
def test_broken_datasets_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=message):
        next(jsonl_items(path, chat=False, output_tokens=1))


def test_poisson_arrivals_have_the_rate_that_was_asked_for() -> None:
    offsets = list(itertools.islice(poisson_offsets(50.0, seed=3), 5000))
    assert offsets == sorted(offsets)
    assert 5000 / offsets[-1] == pytest.approx(50, rel=0.05)


def test_events_are_found_wherever_the_network_cuts() -> None:
    stream = (
        b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}],"usage":null}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 7, len(stream)):
        reader = StreamReader(chat=False)
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
        assert (len(reader.arrivals), reader.finished) == (2, True)
        assert reader.usage == {"prompt_tokens": 4, "completion_tokens": 2}


def test_the_role_event_of_a_chat_is_not_a_token() -> None:
    reader = StreamReader(chat=True)
    reader.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert reader.arrivals == []
    reader.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    assert len(reader.arrivals) == 1


def test_statistics_are_the_usual_ones() -> None:
    statistics = Statistics.of([value / 1000 for value in range(1, 101)])
    assert statistics.mean == pytest.approx(50.5)
    assert statistics.p50 == pytest.approx(50.5)
    assert statistics.p95 == pytest.approx(95.05)
    assert statistics.p99 == pytest.approx(99.01)
    assert math.isnan(Statistics.of([]).p50)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    fast = RequestRecord(started=0, ttft=0.1, e2e=1.1, output_tokens=11)
    slow_start = RequestRecord(started=0, ttft=0.9, e2e=1.9, output_tokens=11)
    slow_tokens = RequestRecord(started=0, ttft=0.1, e2e=9.1, output_tokens=11)
    failed = RequestRecord(started=0, error="HTTP 500")
    records = [fast, slow_start, slow_tokens, failed]
    result = LevelResult(level=Level(requests=4, concurrency=4), records=records, duration=2.0, client_cpu=0.1)
    report = summarize(result, Objective(limits_ms={"ttft": 500, "tpot": 200}))
    assert (report.goodput_per_s, report.good_share, report.failed) == (0.5, 0.25, 1)
