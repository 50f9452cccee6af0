"""Autoscaling: how many engine replicas a pool should have, from what its engines say of themselves.

`Autoscaler` is the policy, pure Python that a simulation runs as well. `ServePolicy` is what Serve's controller calls
(`autoscaling_config.policy`), one for each deployment. A pool grows at once, to what its load needs and at most to
twice its size; it shrinks by small steps after its load has been low for a while, and not while users wait too long.

Prefill replicas are scaled by the prompt tokens that are queued and by time to first token; decode replicas by KV
cache, places in the batch and time per output token; unified ones by all of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from cluster.roles import Role
from engine.config import EngineConfig

POLICY = "cluster.autoscaling:ServePolicy"

FULL = 0.8
"""Share of its KV cache and of its places in the batch that a replica should use; the rest is for the next burst."""
QUEUED_STEPS = 4.0
"""Prompt tokens that may be queued at a replica, in steps full of them."""
ATTAINMENT = 0.95
"""Share of first tokens and of gaps between tokens that should be within the SLO."""
MIN_OBSERVATIONS = 10.0
"""Fewer in the window say nothing about attainment."""
LOW = 0.7
"""A replica stops when the others would then have less to do than this share of what they should."""
UP_COOLDOWN_S = 10.0
"""Between two steps up: load moves to new replicas only with new requests."""
SLO_COOLDOWN_S = 60.0
"""After a step up, misses of the SLO count again only then: those in the window are older."""
MOST_DOWN = 8
"""At most one in so many replicas stops at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSignals:
    """What one engine says of itself; `first_tokens` and `tokens` are counts over a window of some seconds."""

    running: float
    waiting: float
    slots: float  # requests that may run at once
    queued_tokens: float
    step_tokens: float  # most tokens of a step
    kv_usage: float  # 0 to 1
    first_tokens: float
    first_tokens_in_time: float
    tokens: float  # that came after another one of the same request
    tokens_in_time: float

    def to_stats(self) -> dict[str, float]:
        """As a replica reports them to Serve."""
        return asdict(self)

    @classmethod
    def from_stats(cls, metrics: Mapping[str, Mapping[Any, float]], replica: Any) -> Self | None:
        """One replica's, out of Serve's `aggregated_metrics`; None if it has not reported all of them."""
        names = [field.name for field in fields(cls)]
        if any(replica not in metrics.get(name, ()) for name in names):
            return None
        return cls(**{name: metrics[name][replica] for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """A pool at one time."""

    target: int  # replicas that run or are starting
    ready: int
    open_requests: float  # anywhere: at engines, and waiting for one
    signals: Sequence[EngineSignals]  # of replicas that have reported


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    role: Role = Role.UNIFIED
    min_replicas: int = 1  # 0: none at all while there is nothing to do
    max_replicas: int = 1
    downscale_delay_s: float = 300.0


class Autoscaler:
    """One pool's. Remembers since when the load has been low, and when the pool last grew."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._low_since: float | None = None
        self._grown_at = -math.inf

    def decide(self, pool: PoolState, now: float) -> int:
        """The number of replicas that there should be.

        Args:
            now: seconds of any clock.
        """
        wanted = self._from_zero(pool) if pool.target == 0 else self._decide(pool, now)
        wanted = max(self._options.min_replicas, min(self._options.max_replicas, wanted))
        if wanted > pool.target:
            self._grown_at = now
        if wanted != pool.target:
            self._low_since = None
        return wanted

    def _from_zero(self, pool: PoolState) -> int:
        return 1 if pool.open_requests > 0 else 0

    def _decide(self, pool: PoolState, now: float) -> int:
        needed = self._needed(pool, now)
        if needed > pool.target:
            self._low_since = None
            if now - self._grown_at < UP_COOLDOWN_S:
                return pool.target
            return min(math.ceil(needed), 2 * pool.target)
        if not self._is_low(pool, needed):
            self._low_since = None
            return pool.target
        self._low_since = now if self._low_since is None else self._low_since
        if now - self._low_since < self._options.downscale_delay_s:
            return pool.target
        fewest = 0 if pool.target == 1 else max(1, math.ceil(needed / LOW))
        return max(fewest, pool.target - max(1, pool.target // MOST_DOWN))

    def _is_low(self, pool: PoolState, needed: float) -> bool:
        """Whether one replica less would do. All must be up, and must have reported."""
        if pool.ready < pool.target or len(pool.signals) < pool.ready:
            return False
        if pool.target == 1:
            return pool.open_requests == 0 and not any(one.running or one.waiting for one in pool.signals)
        return needed <= LOW * (pool.target - 1)

    # -- how many replicas the load needs

    def _needed(self, pool: PoolState, now: float) -> float:
        if not pool.signals:
            return 0.0
        role = self._options.role
        needed = 0.0
        if role is not Role.DECODE:
            needed = max(needed, _for_prompts(pool.signals))
        if role is not Role.PREFILL:
            needed = max(needed, _for_sequences(pool))
        if now - self._grown_at >= SLO_COOLDOWN_S and pool.ready >= pool.target:
            missed = max(
                0.0 if role is Role.DECODE else _missed(pool.signals, "first_tokens"),
                0.0 if role is Role.PREFILL else _missed(pool.signals, "tokens"),
            )
            if missed:
                needed = max(needed, pool.target + max(1.0, pool.target * missed))
        return needed


def _for_prompts(signals: Sequence[EngineSignals]) -> float:
    """Replicas for the prompt tokens that are queued."""
    per_replica = QUEUED_STEPS * _mean([one.step_tokens for one in signals])
    return sum(one.queued_tokens for one in signals) / per_replica


def _for_sequences(pool: PoolState) -> float:
    """Replicas for the places in the batch and the KV that all requests take, with those that wait for them."""
    signals = pool.signals
    running, waiting = sum(one.running for one in signals), sum(one.waiting for one in signals)
    requests = max(running + waiting, pool.open_requests)
    places = requests / (FULL * _mean([one.slots for one in signals]))
    kv = sum(one.kv_usage for one in signals)
    return max(places, kv * max(1.0, requests / running) / FULL if running else 0.0)


def _missed(signals: Sequence[EngineSignals], what: Literal["first_tokens", "tokens"]) -> float:
    """How far the SLO's attainment is below what it should be; 0 if it is not, or if hardly anything was observed."""
    count: float = sum(getattr(one, what) for one in signals)
    in_time: float = sum(getattr(one, f"{what}_in_time") for one in signals)
    return max(0.0, ATTAINMENT - in_time / count) if count >= MIN_OBSERVATIONS else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class ServePolicy:
    """What Serve makes once per deployment, in its controller, and asks again and again."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of ScalingOptions."""
        self._autoscaler = Autoscaler(ScalingOptions(**{**options, "role": Role(options["role"])}))

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's protocol: the number of replicas, and state that is Serve's to keep (there is none)."""
        metrics = context.aggregated_metrics or {}
        reported = [EngineSignals.from_stats(metrics, replica) for replica in context.running_replicas]
        pool = PoolState(
            target=context.target_num_replicas,
            ready=context.current_num_replicas,
            open_requests=context.total_num_requests,
            signals=[one for one in reported if one is not None],
        )
        return self._autoscaler.decide(pool, context.current_time), {}


def scaling_options(config: EngineConfig, role: Role) -> ScalingOptions | None:
    """What a pool's options say; None where the number of its replicas is fixed."""
    prefix = "prefill_" if role is Role.PREFILL else ""
    fewest, most = getattr(config, f"{prefix}min_replicas"), getattr(config, f"{prefix}max_replicas")
    if most is None:
        return None
    return ScalingOptions(
        role=role,
        min_replicas=1 if fewest is None else fewest,
        max_replicas=most,
        downscale_delay_s=config.downscale_delay_s,
    )


def serve_options(config: EngineConfig, role: Role, started: int) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` for the engines of one role; None where their number is fixed.

    Args:
        started: replicas in the beginning, unless there must be more.
    """
    options = scaling_options(config, role)
    if options is None:
        return None
    return {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "initial_replicas": max(started, options.min_replicas),
        "upscale_delay_s": 0.0,  # delays are the policy's own
        "downscale_delay_s": 0.0,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 3.0,
        "policy": {"policy_function": POLICY, "policy_kwargs": asdict(options)},
    }
