"""The metrics of an engine replica: those of its engine, and those of what brings KV to it and takes it away."""

from __future__ import annotations

from cluster.kv_transfer.metrics import TRANSFER_DEFINITIONS
from cluster.prefix_store.metrics import STORE_DEFINITIONS
from engine.metrics import DEFINITIONS, MetricDefinition, MetricsSnapshot

REPLICA_DEFINITIONS: tuple[MetricDefinition, ...] = DEFINITIONS + TRANSFER_DEFINITIONS + STORE_DEFINITIONS
"""Of all roles. A replica's snapshot has those of its own."""


def merged(*snapshots: MetricsSnapshot) -> MetricsSnapshot:
    """All metrics of several records with different ones."""
    return MetricsSnapshot(
        values={name: value for one in snapshots for name, value in one.values.items()},
        labelled={name: value for one in snapshots for name, value in one.labelled.items()},
        histograms={name: value for one in snapshots for name, value in one.histograms.items()},
    )


def has(snapshot: MetricsSnapshot, definition: MetricDefinition) -> bool:
    name = definition.name
    return name in snapshot.values or name in snapshot.labelled or name in snapshot.histograms
