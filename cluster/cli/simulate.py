"""`sliceserve simulate`: what a cluster would do under some load, in virtual time and without hardware."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster.cli.flags import FlagError
from cluster.cli.simulate_flags import (
    KV_BYTES_PER_TOKEN,
    LINK_FLAGS,
    MOCK_DEFAULTS,
    SLICE_OPTIONS,
    STARTUP_S,
    SYNTHETIC,
    TRANSFER_GB_PER_S,
    TRANSFER_MS,
    engine_options,
    simulate_parser,
)
from cluster.plan.errors import PlanError
from cluster.routing.policies import POLICIES
from cluster.simulate.disaggregation import LinkModel
from cluster.simulate.distributions import Distribution
from cluster.simulate.errors import SimulationError
from cluster.simulate.models import EngineModel, mock_model
from cluster.simulate.report import Report, tables
from cluster.simulate.scenario import Scenario, simulate
from cluster.simulate.trace import TraceRow, read_trace
from cluster.simulate.workload import Shape
from cluster.topology import TopologyError
from engine.config import ConfigError, EngineConfig
from engine.pools import prefill_config


def simulate_command(argv: Sequence[str]) -> int:
    """Prints a report. Returns 0, or 2 for a wrong command line."""
    try:
        flags = simulate_parser().parse(argv)
        policies = _policies(flags.routing_policy)
        scenario = _scenario(flags)
    except (FlagError, ConfigError, SimulationError, PlanError, TopologyError) as error:
        print(f"sliceserve simulate: {error}", file=sys.stderr)
        return 2
    if scenario.num_cut:
        longest = scenario.model.info.max_model_len
        print(f"note: {scenario.num_cut} requests of the trace are cut to {longest} tokens", file=sys.stderr)
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
    for name in SYNTHETIC:
        if getattr(flags, name) is not None:
            raise FlagError(f"--{name} is about synthetic load, and --trace has its own; leave one of them out")
    return tuple(read_trace(flags.trace))


def _shape(flags: argparse.Namespace, max_tokens: int) -> Shape:
    given = {name: getattr(flags, name) for name in SYNTHETIC if getattr(flags, name) is not None}
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
    options = engine_options(flags)
    for name in SLICE_OPTIONS if flags.model is None else MOCK_DEFAULTS:
        if name in options:
            needs = "needs --model and --topology" if flags.model is None else "is about engines without --model"
            raise FlagError(f"--{name} {needs}; leave one of them out")
    config = EngineConfig.from_args({"backend": "mock", **({} if flags.model else MOCK_DEFAULTS), **options})
    if flags.model is None and config.mock_step_ms <= 0:
        raise FlagError("--mock_step_ms=0: a step must take some time; give milliseconds above 0")
    return config


def _models(
    flags: argparse.Namespace, config: EngineConfig, load: Shape | tuple[TraceRow, ...]
) -> tuple[EngineModel, EngineModel | None]:
    """The engines that answer, and those that only prefill, if there are any."""
    if config.disagg_topo is None:
        for name in LINK_FLAGS:
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
