"""A prefix store within the process: the real directory, and whatever a test wants to go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from cluster.prefix_store.client import Found, NewSegment, StoreClient, StoreError
from cluster.prefix_store.directory import Directory
from cluster.prefix_store.messages import Changes, Version
from engine.kv_blocks import KVBlocks, KVLateError, KVLostError, KVPayload, RemotePayload


class FakeStore:
    """What several FakeClients share."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.lock = threading.Condition()
        self.directory: Directory[Sequence[KVBlocks]] = Directory(b"1")
        self.directory.limit("node", capacity_bytes)
        self.delay_s = 0.0  # of every answer but those about changes
        self.gone = False
        self.lost: set[int] = set()  # segments that can't be read
        self.calls: list[str] = []
        self.segments: list[Sequence[bytes]] = []
        self.joins = 0


class FakeClient(StoreClient):
    def __init__(self, store: FakeStore) -> None:
        self._store = store

    def join(self, timeout_s: float) -> None:  # noqa: ARG002
        self._check()
        self._store.joins += 1

    def changes(self, space: bytes, since: Version, timeout_s: float) -> Changes:
        store = self._store
        with store.lock:
            store.lock.wait_for(lambda: store.gone or store.directory.version(space) != since, min(0.1, timeout_s))
            self._check()
            return store.directory.changes(space, since)

    def add(self, segment: NewSegment, timeout_s: float) -> bool:
        self._answer("add", timeout_s)
        with self._store.lock:
            self._store.segments.append(segment.block_hashes)
            taken = self._store.directory.add(segment.offer("node"), segment.shares)
            self._store.lock.notify_all()
        return taken

    def find(self, space: bytes, block_hashes: Sequence[bytes], timeout_s: float) -> Sequence[Found]:
        self._answer("find", timeout_s)
        with self._store.lock:
            directory = self._store.directory
            return [
                Found(run=run, content=directory.content(run.segment)) for run in directory.find(space, block_hashes)
            ]

    def payload(self, found: Found) -> KVPayload:
        return _Payload(self, found)

    def lost(self, found: Found) -> None:
        with self._store.lock:
            self._store.directory.drop(found.run.segment)
            self._store.lock.notify_all()

    def close(self) -> None:
        self._store.calls.append("close")

    def _answer(self, call: str, timeout_s: float) -> None:
        store = self._store
        store.calls.append(call)
        self._check()
        time.sleep(min(store.delay_s, timeout_s))
        if store.delay_s > timeout_s:
            raise StoreError("the prefix store does not answer: timeout")

    def _check(self) -> None:
        if self._store.gone:
            raise StoreError("the prefix store is gone")


class _Payload(RemotePayload):
    def __init__(self, client: FakeClient, found: Found) -> None:
        self._client = client
        self._found = found

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        try:
            self._client._answer("read", timeout_s)
        except StoreError as error:
            raise KVLateError(str(error)) from error
        if self._found.run.segment in self._client._store.lost:
            raise KVLostError("stored KV is lost: its node died")
        shares: Sequence[KVBlocks] = self._found.content
        return shares
