"""Scenario: everything that a simulation is told, and the simulation of it under one routing policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.autoscaling import scaling_options
from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.plan.workload import Slo
from cluster.roles import Role
from cluster.simulate.disaggregation import Courier, LinkModel, SimulatedDecodeConnector, SimulatedPrefillConnector
from cluster.simulate.models import EngineModel
from cluster.simulate.replicas import DoneAt, Listener, Pool
from cluster.simulate.report import Report, summarize
from cluster.simulate.routing import Routers
from cluster.simulate.scaling import ScalingLoop, repeat_failures
from cluster.simulate.simulation import Simulation
from cluster.simulate.timeline import Timeline
from cluster.simulate.trace import TraceRow, TraceWorkload
from cluster.simulate.workload import Job, Shape, SyntheticWorkload
from engine.config import EngineConfig
from engine.kv_connector import KVConnector
from engine.pools import Pools, prefill_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    config: EngineConfig  # options of the server
    model: EngineModel
    load: Shape | tuple[TraceRow, ...]
    num_requests: int  # at most; a trace may have fewer
    trace_speed: float = 1.0
    startup_s: float = 60.0  # of a replica that autoscaling adds, or that replaces one that has failed
    failures_s: float | None = None  # mean time between failures of one replica; None: they don't fail
    prefill_model: EngineModel | None = None  # where config.disagg_topo asks for pools
    link: LinkModel | None = None  # between them
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
        return self._workload().jobs()

    @property
    def num_cut(self) -> int:
        """Requests of the trace that are longer than the engine takes."""
        workload = self._workload()
        return workload.num_cut if isinstance(workload, TraceWorkload) else 0

    def _workload(self) -> SyntheticWorkload | TraceWorkload:
        if isinstance(self.load, Shape):
            return SyntheticWorkload(self.load, self.seed)
        max_tokens = self.model.info.max_model_len
        return TraceWorkload(self.load, speed=self.trace_speed, max_tokens=max_tokens, seed=self.seed)


def simulate(scenario: Scenario, policy: str) -> Report:
    """Runs a scenario under one routing policy to its end."""
    return _Cluster(scenario, policy).run()


class _Cluster:
    """The pools of one simulation."""

    def __init__(self, scenario: Scenario, policy: str) -> None:
        self._scenario = scenario
        self._policy = policy
        self._timeline = Timeline()
        self._simulation = Simulation(self._timeline, scenario.jobs(), scenario.num_requests)
        self._pools: list[Pool] = []
        courier = self._prefill_pool() if scenario.prefill_model is not None else None
        role = Role.UNIFIED if courier is None else Role.DECODE
        fixed = scenario.config.disagg_min_prefill_tokens
        pool = self._pool(
            role,
            scenario.config,
            scenario.model,
            self._simulation,
            connect=None if courier is None else lambda _: SimulatedDecodeConnector(courier, PrefillThreshold(fixed)),
        )
        self._simulation.serve_with(pool)

    def run(self) -> Report:
        self._simulation.run()
        return summarize(self._policy, self._simulation, self._pools, self._scenario.slo)

    def _prefill_pool(self) -> Courier:
        scenario = self._scenario
        assert scenario.prefill_model is not None
        assert scenario.link is not None
        courier = Courier(self._timeline, scenario.link)
        courier.pool = self._pool(
            Role.PREFILL,
            prefill_config(scenario.config),
            scenario.prefill_model,
            courier,
            connect=lambda done_at: SimulatedPrefillConnector(courier, done_at),
        )
        return courier

    def _pool(
        self,
        role: Role,
        config: EngineConfig,
        model: EngineModel,
        listener: Listener,
        *,
        connect: Callable[[DoneAt], KVConnector] | None,
    ) -> Pool:
        scenario, timeline = self._scenario, self._timeline
        routers = Routers(
            config.model_copy(update={"routing_policy": self._policy}),
            count=config.num_ingress_replicas if role is not Role.PREFILL else 1,
            hears_news=role is not Role.PREFILL,
            rng=random.Random(f"routing {role} {scenario.seed}"),
            clock=timeline,
        )
        pool = Pool(
            role.value,
            model,
            timeline,
            routers,
            listener,
            startup_s=scenario.startup_s,
            connect=connect,
            resumes=role is not Role.PREFILL,
        )
        self._pools.append(pool)
        pools = Pools.of(scenario.config)
        self._populate(pool, config, role, pools.prefill if role is Role.PREFILL else pools.decode)
        return pool

    def _populate(self, pool: Pool, config: EngineConfig, role: Role, started: int) -> None:
        options = scaling_options(config, role)
        if options is not None:
            started = max(started, options.min_replicas)
            ScalingLoop(pool, options, self._timeline).start()
        pool.scale_to(started, at_once=True)
        mean_s = self._scenario.failures_s
        if mean_s is not None:
            rng = random.Random(f"failures {role} {self._scenario.seed}")
            repeat_failures(pool, self._timeline, lambda: rng.expovariate(1 / mean_s), rng.randrange)
