"""What a replica counts of its use of the prefix store; exported like the engine's own metrics."""

from __future__ import annotations

import threading

from engine.metrics import MetricDefinition, MetricsSnapshot, counter, gauge

STORE_DEFINITIONS: tuple[MetricDefinition, ...] = (
    gauge("kv_store_connected", "1 while the replica uses the prefix store, else 0."),
    gauge("kv_store_used_bytes", "Bytes in the whole prefix store; one replica reports them, the others 0."),
    counter("kv_store_hit_tokens", "Tokens whose KV came from the prefix store."),
    counter("kv_store_reads", "Prompts for which the prefix store was read."),
    counter(
        "kv_store_reads_dropped",
        "Prompts that the prefix store had and that were computed all the same: it was late, busy or lost them.",
    ),
    counter("kv_store_read_bytes", "Bytes of KV read from the prefix store."),
    counter("kv_store_read_seconds", "Time that reads took, added up."),
    counter("kv_store_written_bytes", "Bytes of KV put into the prefix store."),
    counter("kv_store_write_seconds", "Time that writes to the prefix store took, once KV was read out, added up."),
    counter(
        "kv_store_write_blocks_dropped",
        "KV blocks that were not stored: too much was waiting, or the store did not take them.",
    ),
)


class StoreMetrics:
    """Sums since the replica started, added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {definition.name: 0.0 for definition in STORE_DEFINITIONS}

    def add(self, **amounts: float) -> None:
        """By name, without the prefix `kv_store_`."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[f"kv_store_{name}"] += amount

    def set(self, **values: float) -> None:
        """By name, without the prefix `kv_store_`."""
        with self._lock:
            self._values.update({f"kv_store_{name}": value for name, value in values.items()})

    def snapshot(self) -> MetricsSnapshot:
        with self._lock:
            return MetricsSnapshot(values=dict(self._values), labelled={}, histograms={})
