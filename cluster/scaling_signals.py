"""SignalWindow: an engine's metrics as what autoscaling looks at, counters as what they gained in the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cluster.autoscaling import EngineSignals
from engine.limits import Limits
from engine.metrics import MetricsSnapshot

WINDOW_S = 30.0
"""How far back first tokens and gaps between tokens count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counters:
    at: float
    first_tokens: float
    first_tokens_in_time: float
    tokens: float
    tokens_in_time: float

    @classmethod
    def of(cls, metrics: MetricsSnapshot, now: float) -> _Counters:
        histograms = metrics.histograms
        return cls(
            at=now,
            first_tokens=sum(histograms["time_to_first_token_seconds"].counts),
            first_tokens_in_time=metrics.values["first_tokens_in_slo"],
            tokens=sum(histograms["inter_token_latency_seconds"].counts),
            tokens_in_time=metrics.values["tokens_in_slo"],
        )


class SignalWindow:
    """One engine's. Ask it regularly: it remembers what it saw."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seen: deque[_Counters] = deque()

    def signals(self, metrics: MetricsSnapshot, now: float) -> EngineSignals:
        """
        Args:
            now: seconds of any clock.
        """
        latest = _Counters.of(metrics, now)
        self._seen.append(latest)
        while len(self._seen) > 2 and self._seen[1].at <= now - WINDOW_S:
            self._seen.popleft()
        oldest = self._seen[0]
        values = metrics.values
        return EngineSignals(
            running=values["num_requests_running"],
            waiting=values["num_requests_waiting"],
            slots=self._limits.running,
            queued_tokens=values["num_tokens_waiting"],
            step_tokens=self._limits.step_tokens,
            kv_usage=values["kv_cache_usage_perc"],
            first_tokens=latest.first_tokens - oldest.first_tokens,
            first_tokens_in_time=latest.first_tokens_in_time - oldest.first_tokens_in_time,
            tokens=latest.tokens - oldest.tokens,
            tokens_in_time=latest.tokens_in_time - oldest.tokens_in_time,
        )
