"""RayStoreClient: a replica's connection to the application's PrefixStore actor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster import ray_compat
from cluster.kv_objects import fetched
from cluster.prefix_store.actor import find_or_create
from cluster.prefix_store.client import Found, NewSegment, StoreClient, StoreError
from cluster.prefix_store.messages import Changes, Version
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVPayload, RemotePayload

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.5
"""Of a node's object store, when the option does not say how many bytes."""
LARGEST_SHARE = 0.8
"""The rest is for KV on its way and for what Ray itself needs. More would be written to disk."""

Answer = TypeVar("Answer")


class RayStoreClient(StoreClient):
    """Calls from threads of the replica's process.

    Args:
        capacity_bytes: of this node's memory; None: a share of its object store.
        reads_here: KV is for this process, and not for hosts elsewhere.
    """

    def __init__(self, application: str, replica: str, capacity_bytes: int | None, *, reads_here: bool = True) -> None:
        self._reads_here = reads_here
        self._application = application
        self._replica = replica
        self._wanted_bytes = capacity_bytes
        self._node = ""
        self._store: ActorHandle[Any] | None = None

    def join(self, timeout_s: float) -> None:
        try:
            self._node = ray.get_runtime_context().get_node_id()
            store = find_or_create(self._application)
            ray.get(store.join.remote(self._replica, self._node, self._capacity_bytes()), timeout=timeout_s)
        except (RayError, ValueError) as error:  # the name may be another's just now
            raise StoreError(f"the prefix store can't be reached: {first_line(error)}") from error
        self._store = store

    def changes(self, space: bytes, since: Version, timeout_s: float) -> Changes:
        changes: Changes = self._ask("changes", self._replica, space, since, timeout_s=timeout_s)
        return changes

    def add(self, segment: NewSegment, timeout_s: float) -> bool:
        try:
            lent = ray.put(tuple(segment.shares))
        except RayError as error:
            raise StoreError(f"the object store takes no more: {first_line(error)}") from error
        return bool(self._ask("add", segment.offer(self._node), [lent], timeout_s=timeout_s))

    def find(self, space: bytes, block_hashes: Sequence[bytes], timeout_s: float) -> Sequence[Found]:
        runs = self._ask("find", space, list(block_hashes), timeout_s=timeout_s)
        found = [Found(run=run, content=content) for run, content in runs]
        if len(found) > 1 and self._reads_here:
            with contextlib.suppress(RayError):  # begins to bring all of them here; waits for none
                ray.wait(list(dict.fromkeys(item.content[0] for item in found)), timeout=0)
        return found

    def payload(self, found: Found) -> KVPayload:
        return SegmentPayload(found.content[0])

    def lost(self, found: Found) -> None:
        self._tell("lost", found.run.segment)

    def close(self) -> None:
        self._tell("leave", self._replica)

    def _ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        store = self._store
        if store is None:
            raise StoreError("there is no prefix store now")
        try:
            return ray.get(getattr(store, method).remote(*arguments), timeout=timeout_s)
        except RayError as error:
            raise StoreError(f"the prefix store does not answer: {first_line(error)}") from error

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._store is not None:
            with contextlib.suppress(RayError):
                getattr(self._store, method).remote(*arguments)

    def _capacity_bytes(self) -> int:
        """How much of this node the store may take."""
        here = [node.resources for node in ray_compat.nodes() if node.id == self._node]
        memory = sum(resources.get("object_store_memory", 0.0) for resources in here)
        wanted, largest = self._wanted_bytes, int(LARGEST_SHARE * memory)
        if wanted is None:
            return int(DEFAULT_SHARE * memory)
        if wanted > largest:
            logger.warning(
                "kv_store_gib=%.1f is more than this node's object store allows: %.1f GiB are used "
                "(ray start --object-store-memory makes it larger)",
                wanted / 2**30,
                largest / 2**30,
            )
        return min(wanted, largest)


class SegmentPayload(RemotePayload):
    """A segment of the store. Sent to another process, only the reference travels."""

    def __init__(self, source: ray.ObjectRef[Sequence[KVBlocks]]) -> None:
        self._source = source

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        shares: Sequence[KVBlocks] = fetched(self._source, timeout_s)
        return shares
