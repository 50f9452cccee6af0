"""PrefillConnector: hands the KV that a prefill replica's engine exports to the table of transfers."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kv_transfer.table import TransferTable
from engine.kv_connector import KVConnector, KVEvent, KVExport
from engine.metrics import MetricsSnapshot


class PrefillConnector(KVConnector):
    def __init__(self, table: TransferTable) -> None:
        self._table = table

    def events(self) -> Sequence[KVEvent]:
        return ()

    def metrics(self) -> MetricsSnapshot:
        return self._table.metrics.snapshot()

    def exported(self, export: KVExport) -> None:
        self._table.exported(export)
