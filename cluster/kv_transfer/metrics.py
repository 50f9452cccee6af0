"""What prefill and decode replicas count of their transfers; exported like the engine's own metrics."""

from __future__ import annotations

from collections import Counter

from cluster.roles import Role
from engine.metrics import MetricDefinition, MetricsSnapshot, counter, gauge

FAILURES = ("unavailable", "overloaded", "timeout", "lost", "refused", "lease")
"""Why KV did not come. unavailable: no prefill replica, or it died. overloaded: its queue is full. timeout: it was too
slow. lost: an object is gone or damaged. refused: it can't compute the prompt. lease: nobody fetched what it holds."""


TRANSFER_DEFINITIONS: tuple[MetricDefinition, ...] = (
    counter("kv_transfers", "Prompts that a prefill replica was asked to compute for a decode replica."),
    counter("kv_transfer_failures", "Transfers that did not bring all KV, by reason.", "reason"),
    counter("kv_transfer_tokens", "Tokens whose KV was transferred."),
    counter("kv_transfer_bytes", "Bytes of KV transferred."),
    counter("kv_transfer_seconds", "Time that chunks of KV were on their way, added up."),
    counter(
        "kv_transfer_exposed_seconds",
        "Time that requests waited for KV after their prompt was computed: what transfer adds to their first token.",
    ),
    gauge("kv_transfers_open", "Transfers under way."),
    gauge("kv_transfer_bytes_in_flight", "Bytes of KV that are on their way or reserved for it."),
    gauge("disagg_min_prefill_tokens", "Uncomputed tokens from which on a prompt is computed elsewhere."),
)


DECODE_ONLY = frozenset(
    {"kv_transfer_tokens", "kv_transfer_seconds", "kv_transfer_exposed_seconds", "disagg_min_prefill_tokens"}
)


class TransferMetrics:
    """One replica's record; written by one thread, read from any."""

    def __init__(self, role: Role) -> None:
        self._left_out = DECODE_ONLY if role is Role.PREFILL else frozenset[str]()
        self.started = 0
        self.tokens = 0
        self.bytes = 0
        self.transfer_s = 0.0
        self.exposed_s = 0.0
        self.open = 0
        self.bytes_in_flight = 0
        self.min_prefill_tokens = 0
        self._failures: Counter[str] = Counter()

    def count_chunk(self, num_bytes: int, transfer_s: float = 0.0) -> None:
        self.bytes += num_bytes
        self.transfer_s += transfer_s

    def count_failure(self, reason: str) -> None:
        self._failures[reason] += 1

    def snapshot(self) -> MetricsSnapshot:
        values = {
            "kv_transfers": float(self.started),
            "kv_transfer_tokens": float(self.tokens),
            "kv_transfer_bytes": float(self.bytes),
            "kv_transfer_seconds": self.transfer_s,
            "kv_transfer_exposed_seconds": self.exposed_s,
            "kv_transfers_open": float(self.open),
            "kv_transfer_bytes_in_flight": float(self.bytes_in_flight),
            "disagg_min_prefill_tokens": float(self.min_prefill_tokens),
        }
        return MetricsSnapshot(
            values={name: value for name, value in values.items() if name not in self._left_out},
            labelled={"kv_transfer_failures": {reason: float(self._failures[reason]) for reason in FAILURES}},
            histograms={},
        )
