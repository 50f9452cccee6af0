"""`sliceserve simulate`: what a cluster would do under some load, in virtual time and without hardware."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.cli.flags import FlagError, FlagParser
from cluster.plan.errors import PlanError
from cluster.routing.policies import POLICIES
from cluster.simulate.disaggregation import LinkModel
from cluster.simulate.distributions import EXAMPLE, Distribution
from cluster.simulate.errors import SimulationError
from cluster.simulate.models import EngineModel, mock_model
from cluster.simulate.report import Report, tables
from cluster.simulate.scenario import Scenario, simulate
from cluster.simulate.trace import TraceRow, read_trace
from cluster.simulate.workload import Shape
from cluster.topology import TopologyError
from engine.config import ConfigError, EngineConfig
from engine.pools import prefill_config

DESCRIPTION = """Simulate a cluster: the real scheduler, routing and autoscaling policies in virtual time, over the mock
backend's cost model or a TPU slice's roofline, on synthetic load or a trace. docs/cluster.md explains the numbers."""

STEP_MS, PREFILL_MS_PER_TOKEN = 20.0, 0.05
"""An engine of which nothing else is said: about an 8B model on eight chips of v5e."""

STARTUP_S = 60.0

TRANSFER_GB_PER_S, TRANSFER_MS = 5.0, 5.0
KV_BYTES_PER_TOKEN = 131_072
"""An 8B model's in bfloat16: 32 layers, 8 heads of 128."""

_LINK_FLAGS = ("transfer_gb_per_s", "transfer_ms", "kv_bytes_per_token")
_ENGINE_OPTIONS = (
    *("data_parallel_size", "disagg_topo", "min_replicas", "max_replicas", "prefill_min_replicas"),
    *("prefill_max_replicas", "downscale_delay_s", "slo_ttft_ms", "slo_tpot_ms", "disagg_min_prefill_tokens"),
    *("prefill_block_size", "prefill_num_blocks", "prefill_max_num_batched_tokens", "prefill_max_seqs"),
    *("num_ingress_replicas", "sticky_sessions", "max_queued_requests", "max_decode_seqs", "max_num_batched_tokens"),
    *("max_prefill_seqs", "max_model_len", "num_blocks", "block_size", "enable_prefix_cache_hbm"),
    *("enable_chunked_prefill", "mock_step_ms", "mock_prefill_ms_per_token"),
)
_SLICE_OPTIONS = ("tensor_parallel_size", "quantization", "hbm_utilization_factor")
_MOCK_OPTIONS = ("mock_step_ms", "mock_prefill_ms_per_token")
_SYNTHETIC = (
    *("rate", "arrival", "burstiness", "prompt_tokens", "output_tokens"),
    *("prefix_groups", "prefix_tokens", "prefix_skew", "turns", "think_s"),
)


def simulate_command(argv: Sequence[str]) -> int:
    """Prints a report. Returns 0, or 2 for a wrong command line."""
    try:
        flags = _parser().parse(argv)
        policies = _policies(flags.routing_policy)
        scenario = _scenario(flags)
    except (FlagError, ConfigError, SimulationError, PlanError, TopologyError) as error:
        print(f"sliceserve simulate: {error}", file=sys.stderr)
        return 2
    reports: list[Report] = []
    for policy in policies:
        if sys.stderr.isatty():
            print(f"simulating {policy} …", file=sys.stderr, flush=True)
        with _quiet_engines():
            reports.append(simulate(scenario, policy))
    if flags.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        print(f"engine: {scenario.model.info.device}; seed {scenario.seed}\n\n{tables(reports)}")
    return 0


@contextmanager
def _quiet_engines() -> Iterator[None]:
    """What engines log about each of their requests is not about ours."""
    engine_logger = logging.getLogger("engine")
    level = engine_logger.level
    engine_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        engine_logger.setLevel(level)


def _policies(text: str) -> list[str]:
    policies = [name.strip() for name in text.split(",")]
    for name in policies:
        if name not in POLICIES:
            raise FlagError(f"--routing_policy={text}: no policy {name!r}; use some of {', '.join(POLICIES)}")
    return policies


def _scenario(flags: argparse.Namespace) -> Scenario:
    load = _load(flags)
    config = _config(flags)
    model, prefill_model = _models(flags, config, load)
    if isinstance(load, Shape):
        load = _shape(flags, model.info.max_model_len)
    return Scenario(
        config=config,
        model=model,
        load=load,
        num_requests=flags.requests or (len(load) if isinstance(load, tuple) else 1000),
        trace_speed=flags.trace_speed or 1.0,
        startup_s=_startup_s(flags, config),
        failures_s=flags.failures_s,
        prefill_model=prefill_model,
        link=None if prefill_model is None else _link(flags, model),
        seed=flags.seed,
    )


def _startup_s(flags: argparse.Namespace, config: EngineConfig) -> float:
    if flags.startup_s is None:
        return STARTUP_S
    if flags.failures_s is None and config.max_replicas is None and config.prefill_max_replicas is None:
        raise FlagError("--startup_s is about replicas that start later; set --max_replicas or --failures_s as well")
    return float(flags.startup_s)


def _load(flags: argparse.Namespace) -> Shape | tuple[TraceRow, ...]:
    if flags.trace is None:
        if flags.trace_speed is not None:
            raise FlagError("--trace_speed is about a trace; give one with --trace, or leave it out")
        return _shape(flags, max_tokens=1 << 30)
    for name in _SYNTHETIC:
        if getattr(flags, name) is not None:
            raise FlagError(f"--{name} is about synthetic load, and --trace has its own; leave one of them out")
    return tuple(read_trace(flags.trace))


def _shape(flags: argparse.Namespace, max_tokens: int) -> Shape:
    given = {name: getattr(flags, name) for name in _SYNTHETIC if getattr(flags, name) is not None}
    for name in ("prompt_tokens", "output_tokens"):
        if name in given:
            given[name] = Distribution.parse(name, given[name])
    if flags.burstiness is not None and flags.arrival != "bursty":
        raise FlagError("--burstiness needs --arrival=bursty")
    if bool(flags.prefix_groups) != bool(flags.prefix_tokens):
        raise FlagError("--prefix_groups and --prefix_tokens go together: so many prefixes of so many tokens")
    if flags.prefix_skew is not None and not flags.prefix_groups:
        raise FlagError("--prefix_skew needs --prefix_groups")
    if flags.think_s is not None and (flags.turns or 1) == 1:
        raise FlagError("--think_s needs --turns of 2 or more")
    if (flags.prefix_tokens or 0) + 2 > max_tokens:
        raise FlagError(f"--prefix_tokens={flags.prefix_tokens} leaves no room in sequences of {max_tokens} tokens")
    return Shape(**{"rate": 10.0, "max_tokens": max_tokens, **given})


def _config(flags: argparse.Namespace) -> EngineConfig:
    if (flags.model is None) != (flags.topology is None):
        raise FlagError("--model and --topology go together: a model on a TPU slice")
    refused = _SLICE_OPTIONS if flags.model is None else _MOCK_OPTIONS
    for name in refused:
        if getattr(flags, name) is not None:
            needs = "needs --model and --topology" if flags.model is None else "is about engines without --model"
            raise FlagError(f"--{name} {needs}; leave one of them out")
    options = {"mock_step_ms": STEP_MS, "mock_prefill_ms_per_token": PREFILL_MS_PER_TOKEN} if not flags.model else {}
    given = {name: getattr(flags, name) for name in (*_ENGINE_OPTIONS, *_SLICE_OPTIONS)}
    config = EngineConfig.from_args(
        {"backend": "mock", **options, **{name: value for name, value in given.items() if value is not None}}
    )
    if flags.model is None and config.mock_step_ms <= 0:
        raise FlagError("--mock_step_ms=0: a step must take some time; give milliseconds above 0")
    return config


def _models(
    flags: argparse.Namespace, config: EngineConfig, load: Shape | tuple[TraceRow, ...]
) -> tuple[EngineModel, EngineModel | None]:
    """The engines that answer, and those that only prefill, if there are any."""
    if config.disagg_topo is None:
        for name in _LINK_FLAGS:
            if getattr(flags, name) is not None:
                raise FlagError(f"--{name} is about prefill and decode pools; set --disagg_topo or leave it out")
        return _model(flags, config, load), None
    return _model(flags, config, load), _model(flags, prefill_config(config), load)


def _link(flags: argparse.Namespace, model: EngineModel) -> LinkModel:
    info = model.info
    if flags.model is not None and flags.kv_bytes_per_token is not None:
        raise FlagError("--kv_bytes_per_token is about engines without --model; leave one of them out")
    own = KV_BYTES_PER_TOKEN if flags.model is None else info.bytes_per_block / info.block_size
    return LinkModel(
        bytes_per_s=(flags.transfer_gb_per_s or TRANSFER_GB_PER_S) * 1e9,
        latency_s=(TRANSFER_MS if flags.transfer_ms is None else flags.transfer_ms) / 1000,
        bytes_per_token=flags.kv_bytes_per_token or own,
    )


def _model(flags: argparse.Namespace, config: EngineConfig, load: Shape | tuple[TraceRow, ...]) -> EngineModel:
    if flags.model is None:
        return mock_model(config)
    from cluster.simulate.slices import SliceChoice, slice_model

    if isinstance(load, Shape):
        prompt, output = load.prefix_tokens + load.prompt_tokens.mean, load.output_tokens.mean
    else:
        prompt = sum(row.prompt_tokens for row in load) / len(load)
        output = sum(row.output_tokens for row in load) / len(load)
    choice = SliceChoice(model=flags.model, topology=flags.topology)
    return slice_model(config, choice, max(1, round(prompt)), max(1, round(output)))


def _parser() -> FlagParser:
    parser = FlagParser("sliceserve simulate", DESCRIPTION)
    engine = parser.add_argument_group("Engines")
    engine.add_argument("--model", help="with --topology: folder, config.json, .gguf file or hub id; no weights needed")
    engine.add_argument("--topology", help="TPU slice that each engine runs on, or a part of: v5e:2x4, v6e-8, ...")
    engine.add_argument(
        "--startup_s", type=_seconds, help=f"start-up time of an added replica (default: {STARTUP_S:g})"
    )
    engine.add_argument(
        "--failures_s", type=_failures, help="mean time between failures of a replica, from 1 on (default: never)"
    )
    engine.add_argument(
        "--transfer_gb_per_s",
        type=_positive,
        help=f"of KV between pools, for each replica and direction (default: {TRANSFER_GB_PER_S:g})",
    )
    engine.add_argument(
        "--transfer_ms", type=_seconds, help=f"added to each transfer and call between pools (default: {TRANSFER_MS:g})"
    )
    engine.add_argument(
        "--kv_bytes_per_token", type=_count, help=f"of engines without --model (default: {KV_BYTES_PER_TOKEN})"
    )
    _add_load(parser)
    run = parser.add_argument_group("Run and report")
    run.add_argument(
        "--routing_policy",
        default=",".join(POLICIES),
        help="policies to compare, each in a run of its own with the same requests (default: %(default)s)",
    )
    run.add_argument("--seed", type=_whole, default=0, help="the same seed gives the same numbers (default: 0)")
    run.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.add_argument_group("Options of the server (docs/configuration.md)")
    for name in (*_ENGINE_OPTIONS, *_SLICE_OPTIONS):
        field = EngineConfig.model_fields[name]
        spellings = [f"--{name}"] + ([f"--{field.alias}"] if field.alias else [])
        text = (field.description or "").replace("%", "%%").replace("`", "")
        if field.annotation is bool:
            options.add_argument(*spellings, dest=name, nargs="?", const="true", metavar="true|false", help=text)
        else:
            options.add_argument(*spellings, dest=name, metavar="VALUE", help=text)
    return parser


def _add_load(parser: FlagParser) -> None:
    load = parser.add_argument_group("Load")
    load.add_argument("--requests", type=_count, help="how many at most (default: 1000, or the whole trace)")
    load.add_argument("--trace", type=Path, help="CSV or JSON lines, as Azure's, Mooncake's or docs/cluster.md's")
    load.add_argument("--trace_speed", type=_positive, help="2 plays the trace in half the time (default: 1)")
    load.add_argument("--rate", type=_positive, help="requests (with --turns, conversations) per second (default: 10)")
    load.add_argument("--arrival", choices=["poisson", "bursty", "constant"], help="of requests (default: poisson)")
    load.add_argument("--burstiness", type=_burstiness, help="coefficient of variation of bursty gaps (default: 3)")
    load.add_argument("--prompt_tokens", help=f"{EXAMPLE} (default: 512); of a later turn, what it adds")
    load.add_argument("--output_tokens", help="likewise (default: 128)")
    load.add_argument("--prefix_groups", type=_count, help="so many prefixes that prompts share (default: none)")
    load.add_argument("--prefix_tokens", type=_count, help="length of these prefixes, in front of --prompt_tokens")
    load.add_argument("--prefix_skew", type=_skew, help="exponent of Zipf's law for their popularity (default: 0)")
    load.add_argument("--turns", type=_count, help="requests of a conversation (default: 1)")
    load.add_argument("--think_s", type=_seconds, help="mean time between an answer and the next turn (default: 5)")


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not {what}")
    return value


def _positive(text: str) -> float:
    return _number(text, 1e-6, 1e9, "a number above 0")


def _failures(text: str) -> float:
    return _number(text, 1, 1e9, "a number of seconds, 1 or more")


def _seconds(text: str) -> float:
    return _number(text, 0, 1e9, "a number of seconds, 0 or more")


def _burstiness(text: str) -> float:
    return _number(text, 0.1, 100, "a number from 0.1 to 100")


def _skew(text: str) -> float:
    return _number(text, 0, 10, "a number from 0 to 10")


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) <= 10_000_000 or len(text) > 10:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 10000000")
    return int(text)
