"""What a replica measures of its use of the prefix store."""

from __future__ import annotations

import threading
from collections.abc import Mapping

NAMES = (
    "kv_store_hit_tokens",
    "kv_store_read_bytes",
    "kv_store_read_seconds",
    "kv_store_reads_dropped",
    "kv_store_written_bytes",
    "kv_store_write_seconds",
    "kv_store_writes_dropped",
)


class Counters:
    """Sums since the replica started, added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(NAMES, 0.0)

    def add(self, **amounts: float) -> None:
        """By name, without the prefix `kv_store_`."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[f"kv_store_{name}"] += amount

    def values(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._values)
