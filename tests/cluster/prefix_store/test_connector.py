"""A replica's side of the store: what is written and read, and that no trouble of the store is the engine's."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from cluster.prefix_store import reader, writer
from cluster.prefix_store.connector import PrefixStoreConnector
from engine.backend import BackendError
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, PendingBlocks
from engine.kv_connector import KVArrived, KVComplete, KVDemand, KVEvent
from engine.request import EngineRequest, SamplingParams
from tests.cluster.apps import eventually
from tests.cluster.kv_backend import KVBackend
from tests.cluster.prefix_store.fake_store import FakeClient, FakeStore
from tests.cluster.prefix_store.kv import BLOCK_BYTES, BLOCK_SIZE, FORMAT, ReadyBlocks, hashes, numbers_in

AT_ONCE_S = 0.05


Connect = Callable[[FakeStore], PrefixStoreConnector]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connectors of replicas that have found their store."""
    made: list[PrefixStoreConnector] = []

    def make(store: FakeStore) -> PrefixStoreConnector:
        options = {"backend": "mock", "kv_store": "object_store", "kv_store_min_tokens": 2 * BLOCK_SIZE}
        config = EngineConfig(**options, block_size=BLOCK_SIZE)
        connector = PrefixStoreConnector(config, KVBackend(FORMAT), FakeClient(store))
        connector.attach(lambda: None)
        made.append(connector)
        eventually(lambda: connector._follower.space is not None)
        return connector

    yield make
    for connector in made:
        connector.close()


def store_blocks(connector: PrefixStoreConnector, *numbers: int) -> None:
    """As an engine does that has computed them."""
    assert all(connector.keeps(block_hash) for block_hash in hashes(*numbers))
    connector.computed(hashes(*numbers), ReadyBlocks(*numbers))
    eventually(lambda: all(connector._follower.knows(block_hash) for block_hash in hashes(*numbers)))


def demand(*numbers: int, cached: int = 0, extra_tokens: int = 1, request_id: str = "r") -> KVDemand:
    """A prompt of these blocks and some tokens more."""
    tokens = tuple(range(len(numbers) * BLOCK_SIZE + extra_tokens))
    return KVDemand(
        request=EngineRequest(request_id=request_id, prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1)),
        token_ids=tokens,
        num_cached_tokens=cached * BLOCK_SIZE,
        block_hashes=hashes(*numbers),
    )


def all_events(connector: PrefixStoreConnector, timeout_s: float = 10.0) -> list[KVEvent]:
    """Until the request's KV is complete."""
    events: list[KVEvent] = []

    def complete() -> bool:
        events.extend(connector.events())
        return bool(events) and isinstance(events[-1], KVComplete)

    eventually(complete, timeout_s)
    return events


def blocks_in(events: Sequence[KVEvent]) -> list[int]:
    """The blocks that have arrived; they must be in order and without gaps."""
    arrived = [event for event in events if isinstance(event, KVArrived)]
    assert all(a.end == b.start for a, b in itertools.pairwise(arrived))
    return [number for event in arrived for number in numbers_in(event.payload.shares())]


def timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def test_a_prefix_that_one_replica_computed_reaches_another(connect: Connect) -> None:
    store = FakeStore()
    one, other = connect(store), connect(store)
    store_blocks(one, 1, 2, 3)
    eventually(lambda: other._follower.num_known(hashes(1, 2, 3), 0, 3) == 3)
    assert other.fetch(demand(1, 2, 3, 4)) == 3 * BLOCK_SIZE
    events = all_events(other)
    assert blocks_in(events) == [1, 2, 3]
    assert events[-1] == KVComplete(request_id="r", num_cached_tokens=3 * BLOCK_SIZE)
    assert other.metrics().values["kv_store_hit_tokens"] == 3 * BLOCK_SIZE
    assert one.metrics().values["kv_store_written_bytes"] == 3 * BLOCK_BYTES


def test_only_what_is_not_here_is_fetched_from_the_middle_of_what_is_stored(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3, 4)
    store_blocks(connector, 5, 6)
    assert connector.fetch(demand(1, 2, 3, 4, 5, 9, cached=1)) == 5 * BLOCK_SIZE
    events = all_events(connector)
    assert blocks_in(events) == [2, 3, 4, 5]
    assert isinstance(events[0], KVArrived)
    assert events[0].start == BLOCK_SIZE


def test_a_prompt_that_the_store_knows_nothing_of_costs_no_question(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    assert connector.fetch(demand(7, 1, 2, 3)) is None
    assert connector.fetch(demand(1, 7, 2, 3)) is None  # less than kv_store_min_tokens
    assert connector.fetch(demand(1, 2, 3, cached=3)) is None
    assert "find" not in store.calls


def test_a_prompts_last_token_is_left_to_compute(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    assert connector.fetch(demand(1, 2, 3, extra_tokens=0)) == 2 * BLOCK_SIZE


def test_what_the_store_has_is_not_read_out_again(connect: Connect) -> None:
    store = FakeStore()
    one, other = connect(store), connect(store)
    store_blocks(one, 1, 2)
    assert not one.keeps(hashes(1)[0])
    eventually(lambda: not other.keeps(hashes(2)[0]))


def test_blocks_that_are_evicted_shortly_after_one_another_become_one_object_in_the_chains_order(
    connect: Connect,
) -> None:
    store = FakeStore()
    connector = connect(store)
    for numbers in ((4, 3), (2,), (1,)):  # a pool gives up a chain from its tail
        assert all(connector.keeps(block_hash) for block_hash in hashes(*numbers))
        connector.evicted(hashes(*numbers), ReadyBlocks(*numbers, num_shares=2))
    eventually(lambda: len(store.segments) == 1)
    assert list(store.segments[0]) == hashes(3, 4, 2, 1)
    assert connector.fetch(demand(1, 2, 3, 4)) == 4 * BLOCK_SIZE
    assert blocks_in(all_events(connector)) == [1, 2, 3, 4]


def test_a_large_chunk_becomes_several_objects(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3 * BLOCK_BYTES)
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, *range(1, 8))
    assert list(map(len, store.segments)) == [3, 3, 1]
    assert connector.fetch(demand(*range(1, 8))) == 7 * BLOCK_SIZE
    assert blocks_in(all_events(connector)) == list(range(1, 8))


def test_a_slow_store_keeps_nobody_waiting_and_is_left_in_peace(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FIXED_TIMEOUT_S", 0.2)
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    store.delay_s = 1.0
    assert timed(lambda: connector.fetch(demand(1, 2, 3))) < AT_ONCE_S
    assert timed(lambda: store_late(connector)) < AT_ONCE_S
    assert timed(connector.events) < AT_ONCE_S
    [complete] = all_events(connector, 1.0)
    assert isinstance(complete, KVComplete)
    assert complete.failure
    assert connector.fetch(demand(1, 2, 3, request_id="next")) is None
    assert connector.metrics().values["kv_store_reads_dropped"] == 2
    store.delay_s = 0.0


def test_a_queue_of_fetches_is_no_sign_of_a_slow_store(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "FIXED_TIMEOUT_S", 0.4)
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    store.delay_s = 0.1  # of each, and two at a time
    names = [f"r{number}" for number in range(reader.MAX_FETCHES)]
    for name in names:
        assert connector.fetch(demand(1, 2, 3, request_id=name)) == 3 * BLOCK_SIZE
    ends: list[KVComplete] = []
    deadline = time.monotonic() + 5
    while len(ends) < len(names) and time.monotonic() < deadline:
        ends += [event for event in connector.events() if isinstance(event, KVComplete)]
        time.sleep(0.01)
    assert [end.failure for end in ends] == [None] * len(names)


def store_late(connector: PrefixStoreConnector) -> None:
    assert connector.keeps(hashes(8)[0])
    connector.computed(hashes(8), ReadyBlocks(8))


def test_a_request_that_has_ended_gets_no_more_events(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    store.delay_s = 0.1
    assert connector.fetch(demand(1, 2, 3))
    connector.cancel("r")
    assert connector.fetch(demand(1, 2, cached=0))  # preempted meanwhile: the same id again
    time.sleep(0.5)
    events = list(connector.events())
    assert blocks_in(events) == [1, 2]
    assert len(events) == 2


def test_what_can_not_be_read_is_computed_and_forgotten(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    store_blocks(connector, 4, 5)
    store.lost = {1}
    assert connector.fetch(demand(1, 2, 3, 4, 5)) == 5 * BLOCK_SIZE
    events = all_events(connector)
    assert blocks_in(events) == [1, 2, 3]
    assert isinstance(events[-1], KVComplete)
    assert events[-1].failure
    assert events[-1].num_cached_tokens == 3 * BLOCK_SIZE
    eventually(lambda: connector.keeps(hashes(4)[0]))


class Unread(PendingBlocks):
    """Blocks that the device does not give before it is told to."""

    def __init__(self, *numbers: int) -> None:
        self.given = threading.Event()
        self._blocks = ReadyBlocks(*numbers)

    def result(self) -> Sequence[KVBlocks]:
        self.given.wait(10)
        return self._blocks.result()


def test_what_waits_to_be_written_is_bounded_and_popular_blocks_have_half_of_it_to_themselves(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 4 * BLOCK_BYTES)
    store = FakeStore()
    connector = connect(store)
    for _ in range(2):
        connector.fetch(demand(5, 6, 7))
    taken = [number for number in (1, 2, 3, 5, 6, 7) if connector.keeps(hashes(number)[0])]
    assert taken == [1, 2, 5, 6]
    blocks = Unread(*taken)
    connector.computed(hashes(*taken), blocks)
    assert not connector.keeps(hashes(3)[0])
    assert connector.metrics().values["kv_store_write_blocks_dropped"] == 3
    blocks.given.set()
    eventually(lambda: len(store.segments) == 1)
    eventually(lambda: connector.keeps(hashes(3)[0]))


class Broken(PendingBlocks):
    def result(self) -> Sequence[KVBlocks]:
        raise BackendError("the device is gone")


def test_a_block_that_can_not_be_read_out_is_dropped(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    assert connector.keeps(hashes(1)[0])
    connector.computed(hashes(1), Broken())
    eventually(lambda: connector.metrics().values["kv_store_write_blocks_dropped"] == 1)
    store_blocks(connector, 1)


def test_whatever_goes_wrong_in_writing_costs_the_blocks_of_that_object_only(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore()
    connector = connect(store)
    with monkeypatch.context() as broken:
        broken.setattr(writer, "gather", lambda *_: 1 / 0)
        assert connector.keeps(hashes(1)[0])
        connector.computed(hashes(1), ReadyBlocks(1))
        eventually(lambda: connector.metrics().values["kv_store_write_blocks_dropped"] == 1)
    eventually(lambda: connector.keeps(hashes(1)[0]))
    connector.computed(hashes(1), ReadyBlocks(1))
    eventually(lambda: list(map(list, store.segments)) == [list(hashes(1))])


def test_without_the_store_the_replica_goes_on_and_uses_the_next_one(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    store_blocks(connector, 1, 2, 3)
    store.gone = True
    eventually(lambda: connector._follower.space is None)
    assert connector.fetch(demand(1, 2, 3)) is None
    assert not connector.keeps(hashes(4)[0])
    store.gone = False
    eventually(lambda: connector._follower.space is not None)
    assert store.joins == 2
    assert connector.fetch(demand(1, 2, 3)) == 3 * BLOCK_SIZE


def test_closing_leaves_the_store(connect: Connect) -> None:
    store = FakeStore()
    connector = connect(store)
    connector.close()
    assert "close" in store.calls
