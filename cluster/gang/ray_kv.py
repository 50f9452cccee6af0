"""KV that hosts give when they are asked: results of calls, which belong to who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from cluster.gang.kv import NOT_KEPT, GivenKV, KVHost, KVSlice
from cluster.kv_objects import fetched
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload, RemotePayload, checksum


class WorkerHost(KVHost):
    """A worker of a gang. Can be sent to other processes."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:
        return GivenPayload(self._actor.give.remote(list(slices), heads, with_checksum=checksum))


class GivenPayload(RemotePayload):
    """KV that a host was asked for. Sent to another process, only the reference travels."""

    def __init__(self, source: ray.ObjectRef[Any]) -> None:
        self._source = source

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        given = fetched(self._source, timeout_s)
        if not isinstance(given, GivenKV):
            raise KVLostError(NOT_KEPT)
        if given.checksum is not None and given.checksum != checksum(given.shares):
            raise KVLostError("KV of a prefill host was damaged on its way: wrong checksum")
        return given.shares
