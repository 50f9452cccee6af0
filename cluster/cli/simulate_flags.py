"""The command line of `sliceserve simulate`: its flags, and what they may say each by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.cli.flags import FlagParser, add_config_flags, given
from cluster.routing.policies import POLICIES
from cluster.simulate.distributions import EXAMPLE
from engine.config import EngineConfig

DESCRIPTION = """Simulate a cluster: the real scheduler, routing and autoscaling policies in virtual time, over the mock
backend's cost model or a TPU slice's roofline, on synthetic load or a trace. docs/cluster.md explains the numbers."""

STARTUP_S = 60.0
MOCK_DEFAULTS = {"mock_step_ms": 20.0, "mock_prefill_ms_per_token": 0.05}
"""An engine of which nothing else is said: about an 8B model on eight chips of v5e."""

TRANSFER_GB_PER_S, TRANSFER_MS = 5.0, 5.0
KV_BYTES_PER_TOKEN = 131_072
"""An 8B model's in bfloat16: 32 layers, 8 heads of 128."""

LINK_FLAGS = ("transfer_gb_per_s", "transfer_ms", "kv_bytes_per_token")
ENGINE_OPTIONS = (
    *("data_parallel_size", "disagg_topo", "min_replicas", "max_replicas", "prefill_min_replicas"),
    *("prefill_max_replicas", "downscale_delay_s", "slo_ttft_ms", "slo_tpot_ms", "disagg_min_prefill_tokens"),
    *("prefill_block_size", "prefill_num_blocks", "prefill_max_num_batched_tokens", "prefill_max_seqs"),
    *("num_ingress_replicas", "sticky_sessions", "max_queued_requests", "max_decode_seqs", "max_num_batched_tokens"),
    *("max_prefill_seqs", "max_model_len", "num_blocks", "block_size", "enable_prefix_cache_hbm"),
    *("enable_chunked_prefill", *MOCK_DEFAULTS),
)
SLICE_OPTIONS = ("tensor_parallel_size", "quantization", "hbm_utilization_factor")
OPTIONS = (*ENGINE_OPTIONS, *SLICE_OPTIONS)
"""Of the server. Others decide nothing here, or are flags of this command (`--model`, `--seed`, …)."""
SYNTHETIC = (
    *("rate", "arrival", "burstiness", "prompt_tokens", "output_tokens"),
    *("prefix_groups", "prefix_tokens", "prefix_skew", "turns", "think_s"),
)


def simulate_parser() -> FlagParser:
    parser = FlagParser("sliceserve simulate", DESCRIPTION)
    _add_engines(parser)
    _add_load(parser)
    _add_run(parser)
    add_config_flags(parser, OPTIONS, MOCK_DEFAULTS)
    return parser


def engine_options(flags: argparse.Namespace) -> dict[str, str]:
    """The options of the server that are on the command line."""
    fields = EngineConfig.model_fields
    spellings = {spelling for name in OPTIONS for spelling in (name, fields[name].alias)}
    return {name: value for name, value in given(flags).items() if name in spellings}


def _add_engines(parser: FlagParser) -> None:
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


def _add_run(parser: FlagParser) -> None:
    run = parser.add_argument_group("Run and report")
    run.add_argument(
        "--routing_policy",
        default=",".join(POLICIES),
        help="policies to compare, each in a run of its own with the same requests (default: %(default)s)",
    )
    run.add_argument("--seed", type=_whole, default=0, help="the same seed gives the same numbers (default: 0)")
    run.add_argument("--json", action="store_true", help="print JSON instead of tables")


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
