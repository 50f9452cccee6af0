"""What a replica counts of its use of the prefix store; exported like the engine's own metrics."""

from __future__ import annotations

import threading

from engine.metrics import MetricDefinition, MetricsSnapshot

STORE_DEFINITIONS: tuple[MetricDefinition, ...] = (
    MetricDefinition(
        name="kv_store_connected", kind="gauge", help="1 while the replica uses the prefix store, else 0."
    ),
    MetricDefinition(
        name="kv_store_used_bytes", kind="gauge", help="Bytes in the whole prefix store, as each replica has heard."
    ),
    MetricDefinition(name="kv_store_hit_tokens", kind="counter", help="Tokens whose KV came from the prefix store."),
    MetricDefinition(name="kv_store_reads", kind="counter", help="Prompts for which the prefix store was read."),
    MetricDefinition(
        name="kv_store_reads_dropped",
        kind="counter",
        help="Prompts that the prefix store had and that were computed all the same: it was late, busy or lost them.",
    ),
    MetricDefinition(name="kv_store_read_bytes", kind="counter", help="Bytes of KV read from the prefix store."),
    MetricDefinition(name="kv_store_read_seconds", kind="counter", help="Time that reads took, added up."),
    MetricDefinition(name="kv_store_written_bytes", kind="counter", help="Bytes of KV put into the prefix store."),
    MetricDefinition(
        name="kv_store_write_seconds",
        kind="counter",
        help="Time that writes to the prefix store took, once KV was read out, added up.",
    ),
    MetricDefinition(
        name="kv_store_write_blocks_dropped",
        kind="counter",
        help="KV blocks that were not stored: too much was waiting, or the store did not take them.",
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
