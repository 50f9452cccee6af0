"""The store's actor on a real Ray: who owns what, what survives whom, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray

from cluster.prefix_store.actor import NAMESPACE, Bell, actor_name
from cluster.prefix_store.client import StoreError
from cluster.prefix_store.messages import Version
from cluster.prefix_store.ray_client import RayStoreClient
from engine.kv_blocks import KVBlocks
from tests.chaos.faults import processes
from tests.cluster.apps import eventually
from tests.cluster.prefix_store.actors import store_exists
from tests.cluster.prefix_store.kv import BLOCK_BYTES, FORMAT, SPACE, hashes, numbers_in, segment_of

APPLICATION = "no-such-application"
TIMEOUT_S = 30.0
SOON_S = 5.0
"""Less than it takes the store to give up a replica that it no longer hears of."""
MIB = 1 << 20


class Replica:
    """Another process that stores KV."""

    def __init__(self) -> None:
        self._client = RayStoreClient(APPLICATION, "another", 64 * MIB)
        self._client.join(TIMEOUT_S)

    def store(self, *numbers: int) -> bool:
        return self._client.add(segment_of(*numbers), TIMEOUT_S)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def client(serve_url: str) -> Iterator[RayStoreClient]:  # noqa: ARG001
    """A store of an application that is gone: it lives as long as a replica uses it."""
    made = RayStoreClient(APPLICATION, "here", 64 * MIB)
    made.join(TIMEOUT_S)
    yield made
    made.close()
    eventually(lambda: not store_exists(APPLICATION))
    eventually(lambda: not keepers())


def keepers() -> list[psutil.Process]:
    """Of this Ray, and not of another one's store."""
    return processes("ray::PrefixStoreKeeper")


def test_what_a_replica_stored_outlives_it(client: RayStoreClient) -> None:
    replica = ray.remote(Replica).options(num_cpus=0).remote()
    assert ray.get(replica.store.remote(1, 2, 3), timeout=TIMEOUT_S)
    os.kill(ray.get(replica.pid.remote(), timeout=TIMEOUT_S), signal.SIGKILL)
    [found] = client.find(SPACE, hashes(1, 2, 4), TIMEOUT_S)
    assert found.run.count == 2
    assert numbers_in(client.payload(found).fetch(TIMEOUT_S)) == [1, 2, 3]


def test_large_kv_is_read_in_place(client: RayStoreClient) -> None:
    shape = (FORMAT.num_layers, 2, FORMAT.num_kv_heads, 32 * 1024, FORMAT.head_dim)
    share = KVBlocks(format=FORMAT, heads=range(2), data=np.ones(shape, np.uint16))
    assert client.add(segment_of(10, shares=[share]), TIMEOUT_S)
    [found] = client.find(SPACE, hashes(10), TIMEOUT_S)
    [read] = client.payload(found).fetch(TIMEOUT_S)
    assert np.array_equal(read.data, share.data)
    assert not read.data.flags.owndata
    assert not read.data.flags.writeable


def test_a_follower_hears_of_changes_at_once(client: RayStoreClient) -> None:
    known = client.changes(SPACE, Version(), TIMEOUT_S)
    assert client.add(segment_of(20, 21), TIMEOUT_S)
    assert not client.add(segment_of(20, 21), TIMEOUT_S)
    began = time.monotonic()
    changes = client.changes(SPACE, known.version, TIMEOUT_S)
    assert time.monotonic() - began < 1
    assert set(changes.added) == set(hashes(20, 21))
    everything = client.changes(SPACE, Version(), TIMEOUT_S)
    assert set(everything.added) == {*known.added, *changes.added}
    assert everything.used_bytes == changes.used_bytes >= known.used_bytes + 2 * BLOCK_BYTES


def test_one_replica_reports_what_is_stored_and_another_when_it_has_left(client: RayStoreClient) -> None:
    dead, second = (RayStoreClient(APPLICATION, name, 64 * MIB) for name in ("another", "second"))
    for one in (dead, second):
        one.join(TIMEOUT_S)
    dead.close()  # else the store would wait for it first, some seconds
    client.add(segment_of(50), TIMEOUT_S)
    eventually(lambda: reports(client), SOON_S)
    assert not reports(second)
    client.close()
    eventually(lambda: reports(second), SOON_S)
    client.join(TIMEOUT_S)
    second.close()


def reports(one: RayStoreClient) -> bool:
    """Ask again: whoever leaves waits for no answer, and Ray may let other calls overtake that one."""
    return one.changes(SPACE, Version(), TIMEOUT_S).used_bytes > 0


def test_the_store_takes_no_more_of_a_node_than_its_replicas_allow(client: RayStoreClient) -> None:
    frugal = RayStoreClient(APPLICATION, "frugal", 1024)
    frugal.join(TIMEOUT_S)
    assert not client.add(segment_of(40), TIMEOUT_S)
    client.join(TIMEOUT_S)
    assert client.add(segment_of(40), TIMEOUT_S)


def test_whoever_gives_up_leaves_the_others_waiting_for_the_next_change() -> None:
    async def heard() -> list[bool]:
        bell = Bell()
        waiting = [asyncio.create_task(bell.wait(timeout_s)) for timeout_s in (0.05, 5.0, 5.0)]
        await waiting[0]
        late = asyncio.create_task(bell.wait(5.0))
        await asyncio.sleep(0)
        bell.ring()
        return await asyncio.gather(*waiting, late)

    began = time.monotonic()
    assert asyncio.run(heard()) == [False, True, True, True]
    assert time.monotonic() - began < 2


def test_a_store_that_died_is_replaced_by_an_empty_one(client: RayStoreClient) -> None:
    client.add(segment_of(30), TIMEOUT_S)
    version = client.changes(SPACE, Version(), TIMEOUT_S).version
    ray.kill(ray.get_actor(actor_name(APPLICATION), namespace=NAMESPACE))
    began = time.monotonic()
    with pytest.raises(StoreError):
        client.find(SPACE, hashes(30), TIMEOUT_S)
    assert time.monotonic() - began < 10
    eventually(lambda: joined(client))
    changes = client.changes(SPACE, version, TIMEOUT_S)
    assert changes.whole
    assert not changes.added
    assert client.add(segment_of(30), TIMEOUT_S)


def joined(client: RayStoreClient) -> bool:
    try:
        client.join(TIMEOUT_S)
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_keeper_that_died_or_hangs_is_replaced(client: RayStoreClient, fate: signal.Signals) -> None:
    number = 100 + fate
    assert client.add(segment_of(number), TIMEOUT_S)
    store = ray.get_actor(actor_name(APPLICATION), namespace=NAMESPACE)
    usual = ray.get(store.__ray_call__.remote(lambda self: self._adopt_timeout_s), timeout=TIMEOUT_S)
    ray.get(store.__ray_call__.remote(lambda self: setattr(self, "_adopt_timeout_s", 1.0)), timeout=TIMEOUT_S)
    [keeper] = keepers()
    keeper.send_signal(fate)
    with pytest.raises(StoreError):
        client.add(segment_of(number + 20), TIMEOUT_S)
    ray.get(store.__ray_call__.remote(lambda self: setattr(self, "_adopt_timeout_s", usual)), timeout=TIMEOUT_S)
    assert client.add(segment_of(number + 40), TIMEOUT_S)
    [found] = client.find(SPACE, hashes(number), TIMEOUT_S)  # the store's, not the keeper's
    assert numbers_in(client.payload(found).fetch(TIMEOUT_S)) == [number]
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper.kill()
    eventually(lambda: not keeper.is_running())
