"""Scenario: everything that a simulation is told, and the simulation of it under one routing policy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.autoscaling import scaling_options
from cluster.plan.workload import Slo
from cluster.roles import Role
from cluster.simulate.models import EngineModel
from cluster.simulate.replicas import Pool
from cluster.simulate.report import Report, summarize
from cluster.simulate.routing import Routers
from cluster.simulate.scaling import ScalingLoop, repeat_failures
from cluster.simulate.simulation import Simulation
from cluster.simulate.timeline import Timeline
from cluster.simulate.trace import TraceRow, TraceWorkload
from cluster.simulate.workload import Job, Shape, SyntheticWorkload
from engine.config import EngineConfig
from engine.pools import Pools


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    config: EngineConfig  # options of the server
    model: EngineModel
    load: Shape | tuple[TraceRow, ...]
    num_requests: int  # at most; a trace may have fewer
    trace_speed: float = 1.0
    startup_s: float = 60.0  # of a replica that autoscaling adds, or that replaces one that has failed
    failures_s: float | None = None  # mean time between failures of one replica; None: they don't fail
    seed: int = 0

    @property
    def slo(self) -> Slo | None:
        ttft_ms, tpot_ms = self.config.slo_ttft_ms, self.config.slo_tpot_ms
        if ttft_ms is None and tpot_ms is None:
            return None
        return Slo(
            ttft_s=None if ttft_ms is None else ttft_ms / 1000, tpot_s=None if tpot_ms is None else tpot_ms / 1000
        )

    def jobs(self) -> Iterator[Job]:
        """The requests, the same ones at every call."""
        if isinstance(self.load, Shape):
            return SyntheticWorkload(self.load, self.seed).jobs()
        max_tokens = self.model.info.max_model_len
        return TraceWorkload(self.load, speed=self.trace_speed, max_tokens=max_tokens, seed=self.seed).jobs()


def simulate(scenario: Scenario, policy: str) -> Report:
    """Runs a scenario under one routing policy to its end."""
    config, timeline = scenario.config, Timeline()
    simulation = Simulation(timeline, scenario.jobs(), scenario.num_requests)
    routers = Routers(
        policy,
        count=config.num_ingress_replicas,
        block_size=scenario.model.info.block_size,
        sticky_sessions=config.sticky_sessions,
        caching=scenario.model.limits.caching,
        rng=random.Random(f"routing {scenario.seed}"),
        clock=timeline,
    )
    pool = Pool("engine", scenario.model, timeline, routers, simulation, scenario.startup_s)
    simulation.serve_with(pool)
    _populate(pool, config, Role.UNIFIED, Pools.of(config).decode, timeline)
    if scenario.failures_s is not None:
        rng = random.Random(f"failures {scenario.seed}")
        mean_s = scenario.failures_s
        repeat_failures(pool, timeline, lambda: rng.expovariate(1 / mean_s), rng.randrange)
    simulation.run()
    return summarize(policy, simulation, [pool], scenario.slo)


def _populate(pool: Pool, config: EngineConfig, role: Role, started: int, timeline: Timeline) -> None:
    options = scaling_options(config, role)
    if options is not None:
        started = max(started, options.min_replicas)
        ScalingLoop(pool, options, timeline).start()
    pool.scale_to(started, at_once=True)
