"""PrefixStore: the actor that owns the stored KV, with a keeper on each node that copies it there.

Owner of a Ray object is whoever called for it, and an object dies with its owner. So a replica only lends its KV: the
store calls a keeper on the replica's node, which returns a copy. That copy is the store's, stays on that node, and
never passes through the store's own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef, serve
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.prefix_store.directory import Directory
from cluster.prefix_store.messages import Changes, Offer, Run, Version
from engine.kv_blocks import KVBlocks

NAMESPACE = "sliceserve"
"""Of the names of our actors."""
ADOPT_TIMEOUT_S = 30.0
FOLLOW_WAIT_S = 5.0
"""How long a replica's question for changes is held open when there are none."""
COALESCE_S = 0.05
"""Changes within this time are told together."""
MAX_CALLS = 10_000
"""Open at a time: each replica's question for changes always is, and the others may not wait for it to end."""
MEMBER_TIMEOUT_S = 3 * FOLLOW_WAIT_S
WATCH_INTERVAL_S = 1.0
LAST_TRIES = 10
"""So often in a row Serve may not answer before the store takes it that it is gone."""

Content = list[ObjectRef[tuple[KVBlocks, ...]]]
"""A reference inside a list: Ray replaces bare ones by what they refer to."""


class PrefixStoreKeeper:
    """Copies on its node, for the store. Has no state."""

    def adopt(self, content: Content) -> tuple[tuple[KVBlocks, ...], bool]:
        """The KV as an object of the caller, and as a second one that it is there."""
        shares: tuple[KVBlocks, ...] = ray.get(content[0], timeout=ADOPT_TIMEOUT_S)
        return shares, True


class Bell:
    """Wakes all who wait now. Use it from one event loop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()  # for those who come later

    async def wait(self, timeout_s: float) -> bool:
        """Whether it rang in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), timeout_s)
            return True
        return False


class PrefixStore:
    """An asyncio actor; no method computes for long."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._adopt_timeout_s = ADOPT_TIMEOUT_S
        epoch = os.urandom(8)
        self._name = f"{actor_name(application)}:{epoch.hex()[:4]}"
        self._directory: Directory[Content] = Directory(epoch)
        self._coming: set[tuple[bytes, bytes]] = set()  # (space, block hash) of what is being copied
        self._keepers: dict[str, asyncio.Task[ActorHandle[Any]]] = {}  # by node
        self._num_keepers = 0  # so far
        self._members: dict[str, float] = {}  # replica -> when it was last heard of, monotonic seconds
        self._changed = Bell()
        self._self = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_with_application, name="lifetime", daemon=True).start()

    async def join(self, member: str, node: str, capacity_bytes: int) -> None:
        """A replica begins to use the store, which may take so many bytes of that node."""
        self._members = {name: self._members[name] for name in self._alive()}
        self._members[member] = time.monotonic()
        self._directory.limit(node, capacity_bytes)

    async def leave(self, member: str) -> None:
        self._members.pop(member, None)

    async def add(self, offer: Offer, content: Content) -> bool:
        """Copies what is lent and keeps it. False if it is known, coming, or does not fit."""
        keys = {(offer.space, block_hash) for block_hash in offer.block_hashes}
        if keys <= self._coming or not self._directory.wants(offer):
            return False
        self._coming |= keys
        try:
            adopted = await self._adopt(offer.node, content)
        finally:
            self._coming -= keys
        taken = self._directory.add(offer, adopted)
        if taken:
            self._changed.ring()
        return taken

    async def find(self, space: bytes, block_hashes: Sequence[bytes]) -> list[tuple[Run, Content]]:
        runs = self._directory.find(space, block_hashes)
        return [(run, self._directory.content(run.segment)) for run in runs]

    async def lost(self, segment: int) -> None:
        self._directory.drop(segment)
        self._changed.ring()

    async def changes(self, member: str, space: bytes, since: Version) -> Changes:
        """Waits until there are changes, some seconds at most. A replica that asks is alive."""
        deadline = time.monotonic() + FOLLOW_WAIT_S
        self._members[member] = time.monotonic()
        while True:
            left = deadline - time.monotonic()
            if since != self._directory.version(space) or left <= 0:
                changes = self._directory.changes(space, since)
                return changes if member in self._alive()[:1] else replace(changes, used_bytes=0)
            if await self._changed.wait(left):
                await asyncio.sleep(COALESCE_S)

    def _alive(self) -> list[str]:
        """Replicas that were heard of lately; the one that came first tells the world how much is stored."""
        heard_after = time.monotonic() - MEMBER_TIMEOUT_S
        return [name for name, heard in list(self._members.items()) if heard > heard_after]

    async def _adopt(self, node: str, content: Content) -> Content:
        keeper = await self._keeper(node)
        try:
            kept: ObjectRef[Any]
            done: ObjectRef[bool]
            kept, done = keeper.adopt.options(num_returns=2).remote(content)
            await asyncio.wait_for(done, self._adopt_timeout_s)  # not `kept`, which would come to this node
        except RayTaskError:  # what was lent can't be read, for which the keeper can do nothing
            raise
        except (RayError, TimeoutError):
            self._keepers.pop(node, None)  # the next offer makes another one
            ray.kill(keeper)
            raise
        return [kept]

    async def _keeper(self, node: str) -> ActorHandle[Any]:
        making = self._keepers.get(node)
        if making is None:
            self._num_keepers += 1
            name = f"{self._name}:{node[:8]}:{self._num_keepers}"  # that of one that hangs stays taken for a while
            making = self._keepers[node] = asyncio.create_task(asyncio.to_thread(_make_keeper, name, node))
        try:
            return await asyncio.shield(making)
        except Exception:
            self._keepers.pop(node, None)
            raise

    def _end_with_application(self) -> None:
        """Ends this actor when no replica uses it and its application is gone. Runs on a thread of its own."""
        unanswered = 0
        while unanswered < LAST_TRIES:
            time.sleep(WATCH_INTERVAL_S)
            if self._alive():
                unanswered = 0
                continue
            try:
                if not _application_exists(self._application):
                    break
                unanswered = 0
            except Exception:  # Serve's controller is dying, or being replaced
                unanswered += 1
        ray.kill(self._self)


def actor_name(application: str) -> str:
    return f"sliceserve:{application}:prefix-store"


def _application_exists(name: str) -> bool:
    application = serve.status().applications.get(name)
    return application is not None and application.status != "DELETING"


def _make_keeper(name: str, node: str) -> ActorHandle[Any]:
    """On that node and no other; it ends with the store."""
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": where}
    keeper: ActorHandle[Any] = ray.remote(PrefixStoreKeeper).options(**options).remote()  # type: ignore[assignment]
    return keeper


def find_or_create(application: str) -> ActorHandle[Any]:
    """The application's store; detached, so that it outlives the replica that happened to create it."""
    store: ActorHandle[Any] = (
        ray.remote(PrefixStore)  # type: ignore[assignment]
        .options(
            name=actor_name(application),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
        )
        .remote(application)
    )
    return store
