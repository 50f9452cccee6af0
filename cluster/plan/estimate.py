"""From the cost of steps to what users see: tokens a second, time to first token, time per output token.

Requests of one size, a constant number in flight (a closed loop), continuous batching with chunked prefill. Without an
efficiency the results are bounds: prefill, weights, keys and collectives overlap perfectly, and no engine can be
faster on these peaks. With a calibrated efficiency they are what servers of today reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.plan.costs import StepCost, StepCosts
from cluster.plan.roofline import Efficiency, Peaks, decode_s, prefill_s, step_time
from cluster.plan.workload import Workload

_MOST_BUSY = 0.95
"""A closed loop holds back what would queue without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Performance:
    """Of a whole deployment."""

    output_tokens_per_s: float
    ttft_s: float  # mean
    tpot_s: float  # mean
    running: int  # sequences per group that run at once; fewer than asked for where the KV cache is full


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One tensor-parallel group that serves: its costs, its device's peaks, its limits."""

    costs: StepCosts
    peaks: Peaks
    step_tokens: int  # most tokens of one step
    kv_tokens: int  # capacity of the KV cache
    max_rows: int  # most sequences at once

    def running(self, workload: Workload, concurrency: float) -> int:
        """Sequences that run at once, of `concurrency` that want to; on average each holds half of its output."""
        held = workload.input_tokens + workload.output_tokens / 2
        return max(1, min(math.ceil(concurrency), self.max_rows, int(self.kv_tokens // held)))

    def chunks(self, workload: Workload, rows: int) -> int:
        """Steps that one prompt takes beside `rows` decoding ones."""
        return math.ceil(workload.input_tokens / max(1, self.step_tokens - rows))

    def prompt(self, workload: Workload) -> StepCost:
        """All of one prompt's tokens, without the weights that its steps read anyway."""
        return self.costs.prefill(workload.input_tokens, workload.input_tokens / 2)

    def decode(self, workload: Workload, rows: float) -> StepCost:
        return self.costs.decode(rows, workload.mean_context)


def unified(group: Group, workload: Workload, groups: int, efficiency: Efficiency | None) -> Performance:
    """Performance of `groups` equal groups that prefill and decode.

    Args:
        efficiency: None gives the bound.
    """
    wanted = workload.concurrency / groups
    rows = group.running(workload, wanted)
    steps = max(1, workload.output_tokens - 1)
    prompt = group.prompt(workload)
    decode = group.decode(workload, rows)
    weights = group.decode(workload, 0)
    chunks = group.chunks(workload, rows)
    # Steps that only prefill, because there are more prompt tokens than the decoding steps have room for.
    extra = max(0.0, rows * (workload.input_tokens + steps) / group.step_tokens - steps)
    if efficiency is None:
        duration = _bound(decode * steps + prompt * rows + weights * extra, group.peaks)
        ttft = _bound(prompt + weights * chunks, group.peaks)
        tpot = _bound(decode, group.peaks)
    else:
        step_s = decode_s(decode, group.peaks, efficiency)
        prompt_s = prefill_s(prompt, group.peaks, efficiency)
        duration = steps * step_s + rows * prompt_s + extra * decode_s(weights, group.peaks, efficiency)
        ttft = step_s / 2 + _with_queue(prompt_s + chunks * step_s, busy=rows * prompt_s / duration)
        tpot = max(step_s, (duration - prompt_s) / steps)
    duration = max(duration, ttft + steps * tpot)  # no request is done sooner than alone
    ttft += duration * max(0.0, wanted / rows - 1)
    return _performance(workload, min(workload.concurrency, rows * groups) / duration, ttft, tpot, rows)


def disaggregated(
    group: Group, workload: Workload, prefill: int, decode: int, efficiency: Efficiency | None
) -> Performance:
    """Performance of `prefill` groups that only prefill and `decode` groups that only decode.

    The transfer of keys and values between them is taken as hidden.
    """
    wanted = workload.concurrency / decode
    rows = group.running(workload, wanted)
    steps = max(1, workload.output_tokens - 1)
    prompt = group.prompt(workload)
    weights = group.decode(workload, 0) * group.chunks(workload, 0)
    if efficiency is None:
        step_s = _bound(group.decode(workload, rows), group.peaks)
        prompt_s = _bound(prompt + weights, group.peaks)
    else:
        step_s = decode_s(group.decode(workload, rows), group.peaks, efficiency)
        prompt_s = efficiency.step_s + prefill_s(prompt + weights, group.peaks, efficiency)
    # Prefill, decode, or the requests themselves, each of which goes through both, bound the rate.
    in_service = min(workload.concurrency, decode * rows)
    rate = min(prefill / prompt_s, in_service / (steps * step_s), workload.concurrency / (prompt_s + steps * step_s))
    ttft = prompt_s if efficiency is None else _with_queue(prompt_s, busy=rate * prompt_s / prefill)
    ttft += steps * step_s * max(0.0, wanted / rows - 1)
    return _performance(workload, rate, ttft, step_s, rows)


def _with_queue(service_s: float, busy: float) -> float:
    """Waiting and service where prompts of one length arrive at random (an M/D/1 queue)."""
    load = min(_MOST_BUSY, busy)
    return service_s * (1 + load / (2 * (1 - load)))


def _bound(cost: StepCost, peaks: Peaks) -> float:
    return step_time(cost, peaks).bound_s


def _performance(workload: Workload, requests_per_s: float, ttft_s: float, tpot_s: float, rows: int) -> Performance:
    return Performance(
        output_tokens_per_s=requests_per_s * workload.output_tokens, ttft_s=ttft_s, tpot_s=tpot_s, running=rows
    )
