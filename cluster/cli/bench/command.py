"""The command line of `sliceserve bench`."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from cluster.cli.bench.driver import Endpoint, Level, RequestRecord, run_level, served_model
from cluster.cli.bench.http_stream import HttpClient, HttpError, Target
from cluster.cli.bench.plot import PlotError, check_plot, write_plot
from cluster.cli.bench.report import LevelReport, Objective, summarize, table
from cluster.cli.bench.workload import PromptShape, WorkItem, WorkloadError, jsonl_items, random_items
from cluster.cli.flags import FlagError, FlagParser
from cluster.cli.server_flags import add_server_flags, server_url

DESCRIPTION = """Put load on an OpenAI-compatible server and measure TTFT (time to first token), TPOT (time per output
token after the first), ITL (gaps between arrivals), E2E (whole requests), throughput and goodput."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """A checked command line."""

    target: Target
    endpoint: Endpoint
    levels: list[Level]
    items: Iterator[WorkItem]
    warmup: int
    objective: Objective | None
    seed: int
    api_key: str | None


def bench(argv: Sequence[str]) -> int:
    """Runs the load levels in order and prints the report. Returns 0, 1 for failed requests, 2 for wrong flags."""
    try:
        flags = _parser().parse(argv)
        plan = _plan(flags)
        for path in (flags.plot,) if flags.plot else ():
            check_plot(path)
    except (FlagError, WorkloadError, HttpError, PlotError) as error:
        return _complain(error, 2)
    try:
        model, reports = uvloop.run(_run(plan))
    except HttpError as error:
        return _complain(error, 1)
    text = table(reports, by_rate=plan.levels[0].rate is not None)
    print(text)
    for report in reports:
        for message, count in report.errors.items():
            print(f"{report.level}: {count} failed: {message}", file=sys.stderr)
    try:
        _write_files(flags, model, reports, text)
    except OSError as error:
        return _complain(error, 1)
    return 1 if any(report.failed for report in reports) else 0


def _complain(error: Exception, code: int) -> int:
    print(f"sliceserve bench: {error}", file=sys.stderr)
    return code


async def _run(plan: BenchPlan) -> tuple[str, list[LevelReport]]:
    client = HttpClient(plan.target, api_key=plan.api_key)
    try:
        model = plan.endpoint.model or await served_model(client)
        endpoint = Endpoint(
            model=model, chat=plan.endpoint.chat, timeout_s=plan.endpoint.timeout_s, extra=plan.endpoint.extra
        )
        await _warm_up(client, endpoint, plan)
        reports = []
        for index, level in enumerate(plan.levels):
            with _Counter(level) as counter:
                result = await run_level(
                    client, endpoint, plan.items, level, seed=plan.seed + index, on_done=counter.count
                )
            reports.append(summarize(result, plan.objective))
        return model, reports
    finally:
        client.close()


async def _warm_up(client: HttpClient, endpoint: Endpoint, plan: BenchPlan) -> None:
    """Requests that nobody measures. If all of them fail, so would the rest: the first error is raised."""
    if not plan.warmup:
        return
    result = await run_level(client, endpoint, plan.items, Level(requests=plan.warmup, concurrency=plan.warmup))
    errors = [record.error for record in result.records if record.error is not None]
    if len(errors) == plan.warmup:
        raise HttpError(errors[0])


class _Counter:
    """A line on a terminal that counts finished requests."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._done = 0
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def count(self, _record: RequestRecord) -> None:
        self._done += 1
        if self._shown:
            print(
                f"\rload {self._level.name}: {self._done} of {self._level.requests}",
                end="",
                file=sys.stderr,
                flush=True,
            )


def _write_files(flags: argparse.Namespace, model: str, reports: list[LevelReport], text: str) -> None:
    if flags.json:
        settings = {key: str(value) for key, value in vars(flags).items() if value is not None and key != "api_key"}
        content = {"model": model, "settings": settings, "levels": [report.to_json() for report in reports]}
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if flags.plot:
        write_plot(flags.plot, reports, title=f"{model} at {server_url(flags)}", table=text)


def _plan(flags: argparse.Namespace) -> BenchPlan:
    chat = flags.endpoint == "chat"
    if chat and flags.prompt_format == "ids" and flags.dataset is None:
        raise FlagError("--endpoint=chat takes text: add --prompt_format=text or --dataset")
    extra = {"temperature": flags.temperature, **({"ignore_eos": True} if flags.ignore_eos else {}), **flags.extra}
    endpoint = Endpoint(model=flags.model or "", chat=chat, timeout_s=flags.timeout, extra=extra)
    return BenchPlan(
        target=Target.from_url(server_url(flags)),
        endpoint=endpoint,
        levels=_levels(flags),
        items=_items(flags, chat),
        warmup=flags.warmup,
        objective=flags.slo,
        seed=flags.seed,
        api_key=flags.api_key,
    )


def _levels(flags: argparse.Namespace) -> list[Level]:
    if flags.rate is None:
        return [
            Level(requests=flags.requests or max(4, 2 * int(number)), concurrency=int(number))
            for number in flags.concurrency or [1, 8, 32]
        ]
    cap = None if flags.concurrency is None else int(flags.concurrency[0])
    return [
        Level(requests=flags.requests or max(16, round(30 * rate)), rate=rate, concurrency=cap) for rate in flags.rate
    ]


def _items(flags: argparse.Namespace, chat: bool) -> Iterator[WorkItem]:
    if flags.dataset is not None:
        items = jsonl_items(flags.dataset, chat=chat, output_tokens=flags.output_tokens)
        return itertools.chain([next(items)], items)  # reads the file now, while errors are errors of the command line
    shape = PromptShape(
        prompt_tokens=flags.prompt_tokens,
        output_tokens=flags.output_tokens,
        shared_prefix_tokens=flags.shared_prefix_tokens,
        form=flags.prompt_format,
        vocab_size=flags.vocab_size,
    )
    return random_items(shape, chat=chat, seed=flags.seed)


def _parser() -> FlagParser:
    parser = FlagParser("sliceserve bench", DESCRIPTION)
    server = parser.add_argument_group("Server")
    add_server_flags(server)
    server.add_argument("--model", help="model name (default: the first the server lists)")
    server.add_argument("--api_key", help="sent as bearer token")
    server.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions", help="(default: %(default)s)"
    )
    server.add_argument(
        "--timeout", type=_positive(float), default=600.0, help="seconds a request may take (default: 600)"
    )
    load = parser.add_argument_group("Load")
    load.add_argument("--concurrency", type=_numbers(int), help="requests at a time, one level each (default: 1,8,32)")
    load.add_argument(
        "--rate", type=_numbers(float), help="Poisson arrivals a second, one level each; --concurrency caps them"
    )
    load.add_argument(
        "--requests", type=_positive(int), help="per level (default: twice the concurrency, or 30 s of arrivals)"
    )
    load.add_argument("--warmup", type=int, default=1, help="requests before measuring (default: %(default)s)")
    load.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    prompts = parser.add_argument_group("Requests")
    prompts.add_argument("--prompt_tokens", type=_positive(int), default=128, help="(default: %(default)s)")
    prompts.add_argument("--output_tokens", type=_positive(int), default=128, help="(default: %(default)s)")
    prompts.add_argument(
        "--shared_prefix_tokens", type=int, default=0, help="tokens that start every prompt (default: 0)"
    )
    prompts.add_argument(
        "--prompt_format", choices=["ids", "text"], default="ids", help="token ids are exact, text is common words"
    )
    prompts.add_argument("--vocab_size", type=int, default=32000, help="random ids stay below (default: %(default)s)")
    prompts.add_argument("--dataset", type=Path, help="JSONL with prompt or messages, and optional max_tokens")
    prompts.add_argument("--ignore_eos", action="store_true", help="generate all output tokens (ours and vLLM)")
    prompts.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    prompts.add_argument("--extra", type=_json_object, default={}, help="JSON object that is added to every request")
    output = parser.add_argument_group("Report")
    output.add_argument("--slo", type=_objective, help="for goodput, in ms: ttft=500,tpot=50,e2e=10000")
    output.add_argument("--json", type=Path, help="write the numbers to this file")
    output.add_argument("--plot", type=Path, help="write a picture to this file (.png, .svg or .html)")
    return parser


def _positive(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> int | float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    read.__name__ = kind.__name__  # argparse names the type in its error
    return read


def _numbers(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> list[int | float]:
        return [_positive(kind)(part) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__}"
    return read


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _objective(text: str) -> Objective:
    limits = {}
    for part in text.split(","):
        metric, _, limit = part.partition("=")
        if metric not in ("ttft", "tpot", "e2e"):
            raise argparse.ArgumentTypeError(f"{part!r} is not like ttft=500 (ttft, tpot and e2e, in ms)")
        limits[metric] = float(_positive(float)(limit))
    return Objective(limits_ms=limits)
