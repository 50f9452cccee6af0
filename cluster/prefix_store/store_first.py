"""StoreFirst: a replica that has the prefix store and another connector: the prefill pool's, or decode's to it.

A prompt's beginning comes from the store if it is there. For what is missing then, the other connector is asked as if
for a request with a longer cached prefix; it decides, as it always does, whether asking elsewhere pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cluster.replica_metrics import merged
from engine.kv_blocks import PendingBlocks
from engine.kv_connector import KVComplete, KVConnector, KVDemand, KVEvent, KVExport
from engine.metrics import MetricsSnapshot


class StoreFirst(KVConnector):
    def __init__(self, store: KVConnector, other: KVConnector) -> None:
        self._store = store
        self._other = other
        self._demands: dict[str, KVDemand] = {}  # what the store is asked for
        self._from_store: dict[str, int] = {}  # of what the other one is asked for: tokens that the store had
        self.wants_computed = store.wants_computed

    def attach(self, wake: Callable[[], None]) -> None:
        self._store.attach(wake)
        self._other.attach(wake)

    def fetch(self, demand: KVDemand) -> int | None:
        if self._store.fetch(demand) is None:
            return self._other.fetch(demand)
        self._demands[demand.request.request_id] = demand
        return len(demand.token_ids)  # the rest may come from the other one

    def cancel(self, request_id: str) -> None:
        self._demands.pop(request_id, None)
        self._from_store.pop(request_id, None)
        self._store.cancel(request_id)
        self._other.cancel(request_id)

    def events(self) -> Sequence[KVEvent]:
        return [*self._store_events(), *self._other_events()]

    def _store_events(self) -> Iterator[KVEvent]:
        for event in self._store.events():
            if not isinstance(event, KVComplete):
                yield event
                continue
            demand = self._demands.pop(event.request_id)
            arrived = max(demand.num_cached_tokens, event.num_cached_tokens)
            if self._other.fetch(replace(demand, num_cached_tokens=arrived)) is None:
                yield event
            else:
                self._from_store[event.request_id] = arrived

    def _other_events(self) -> Iterator[KVEvent]:
        for event in self._other.events():
            if isinstance(event, KVComplete):
                cached = max(event.num_cached_tokens, self._from_store.pop(event.request_id, 0))
                yield replace(event, num_cached_tokens=cached)
            else:
                yield event

    def exported(self, export: KVExport) -> None:
        self._other.exported(export)

    def keeps(self, block_hash: bytes) -> bool:
        return self._store.keeps(block_hash)

    def evicted(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        self._store.evicted(block_hashes, blocks)

    def computed(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        self._store.computed(block_hashes, blocks)

    def metrics(self) -> MetricsSnapshot:
        return merged(self._store.metrics(), self._other.metrics())

    def close(self) -> None:
        self._store.close()
        self._other.close()
