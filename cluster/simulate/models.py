"""EngineModel: what a simulated engine can hold, and how fast it is; here that of the mock backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backends.mock import MockBackend
from backends.mock.cost import MockCost
from engine.backend import BackendInfo, Capabilities
from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.limits import Limits, usable


class StepClock(Protocol):
    def step_s(self, batch: StepBatch) -> float:
        """Seconds that the device works on a step."""
        ...

    def decode_s(self, num_rows: int, kv_tokens: int) -> float:
        """The same for a step that only decodes, whose requests have so many tokens in the KV cache together."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """What all engines of a pool have in common."""

    info: BackendInfo
    limits: Limits
    clock: StepClock
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None


def mock_model(
    config: EngineConfig, *, capabilities: Capabilities | None = None, clock: StepClock | None = None
) -> EngineModel:
    """An engine of the mock backend: a time per step, and one for each token of prefill, unless there is a `clock`."""
    info = MockBackend(config, capabilities=capabilities).load()
    return engine_model(config, info, clock or MockCost.of(config))


def engine_model(config: EngineConfig, info: BackendInfo, clock: StepClock) -> EngineModel:
    limits = Limits.of(config, info)
    return EngineModel(
        info=usable(info, limits),
        limits=limits,
        clock=clock,
        slo_ttft_ms=config.slo_ttft_ms,
        slo_tpot_ms=config.slo_tpot_ms,
    )
