"""From bytes and operations to seconds: a device's peaks, and what today's servers reach of them."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.plan.costs import StepCost
from cluster.topology import TpuSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """One device's peaks (a tpu7x chip is two devices)."""

    hbm_bytes_per_s: float
    flops_per_s: float  # bfloat16: quantized weights are multiplied in it, too
    ici_bytes_per_s: float  # sent, over the links that every chip of the slice has

    @classmethod
    def of(cls, chosen: TpuSlice) -> Peaks:
        chip = chosen.generation
        links = chosen.links_per_chip * chip.ici_gb_per_s_per_link
        return cls(
            hbm_bytes_per_s=chip.hbm_gb_per_s * 1e9 / chip.devices_per_chip,
            flops_per_s=chip.bf16_tflops * 1e12 / chip.devices_per_chip,
            ici_bytes_per_s=links * 1e9 / chip.devices_per_chip,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peaks that servers reach, and fixed times."""

    hbm: float
    mxu: float  # in prefill; a decode step's products hide behind the reading of its weights
    ici: float
    step_s: float  # host time and everything else that a step takes whatever its size
    collective_s: float  # start of one collective


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds that a step keeps each resource busy."""

    hbm_s: float
    mxu_s: float
    ici_s: float

    @property
    def bound_s(self) -> float:
        """No program is faster: the busiest resource, all others hidden behind it."""
        return max(self.hbm_s, self.mxu_s, self.ici_s)

    @property
    def limit(self) -> str:
        """Which resource that is."""
        return max((self.hbm_s, "HBM"), (self.mxu_s, "MXU"), (self.ici_s, "ICI"))[1]


def step_time(cost: StepCost, peaks: Peaks) -> StepTime:
    return StepTime(
        hbm_s=cost.hbm_bytes / peaks.hbm_bytes_per_s,
        mxu_s=cost.flops / peaks.flops_per_s,
        ici_s=cost.ici_bytes / peaks.ici_bytes_per_s if cost.ici_bytes else 0.0,
    )


def decode_s(cost: StepCost, peaks: Peaks, efficiency: Efficiency) -> float:
    """What a decode step takes on a server of today: collectives and host time add to the reading of memory."""
    time = step_time(cost, peaks)
    work = max(time.hbm_s / efficiency.hbm, time.mxu_s)
    return efficiency.step_s + work + time.ici_s / efficiency.ici + cost.collectives * efficiency.collective_s


def prefill_s(cost: StepCost, peaks: Peaks, efficiency: Efficiency) -> float:
    """What prefill adds to steps that run anyway."""
    time = step_time(cost, peaks)
    return max(time.hbm_s / efficiency.hbm, time.mxu_s / efficiency.mxu) + time.ici_s / efficiency.ici
