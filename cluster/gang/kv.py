"""KV of a gang: each host reads and writes its own share; the leader sees all of them as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from engine.kv_blocks import KVBlocks, KVFormat, KVLostError, PendingBlocks


class GangBlocks(PendingBlocks):
    """KV that stays with the hosts until somebody asks for it."""

    def __init__(self, collect: Callable[[], Sequence[KVBlocks]]) -> None:
        self._collect = collect
        self._lock = threading.Lock()
        self._shares: Sequence[KVBlocks] | None = None

    def result(self) -> Sequence[KVBlocks]:
        with self._lock:
            if self._shares is None:
                self._shares = self._collect()
            return self._shares


def merged(by_host: Sequence[Sequence[KVBlocks]]) -> list[KVBlocks]:
    """All hosts' shares, without those whose heads another host has given, too."""
    shares: dict[range, KVBlocks] = {}
    for host in by_host:
        for share in host:
            shares.setdefault(share.heads, share)
    return list(shares.values())


def check_payload(shares: Sequence[KVBlocks], kept: KVFormat) -> None:
    """Checks that every host of a gang will find its heads among these shares.

    Raises:
        KVLostError: one would not.
    """
    if any(share.format != kept for share in shares):
        raise KVLostError(f"KV of another model arrived, {shares[0].format} where {kept} is kept")
    lengths = {share.num_tokens for share in shares}
    missing = set(range(kept.num_kv_heads)) - {head for share in shares for head in share.heads}
    if len(lengths) != 1 or missing:
        raise KVLostError(f"KV of unequal lengths {sorted(lengths)} or without heads {sorted(missing)} arrived")
