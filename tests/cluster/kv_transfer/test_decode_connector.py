"""The decode side: what is asked for, what arrives in which order, and what happens when it does not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cluster.kv_transfer.decode_connector import DecodeConnector
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import ObjectStoreTransport
from cluster.kv_transfer.prefill_pool import PrefillError
from cluster.kv_transfer.threshold import FIRST_GUESS, LARGEST, PrefillThreshold
from cluster.roles import Role
from engine.backend import Backend
from engine.kv_blocks import KVLateError, KVLostError, KVPayload
from engine.kv_connector import KVArrived, KVComplete, KVDemand, KVEvent
from tests.cluster.apps import eventually
from tests.cluster.kv_backend import KVBackend
from tests.cluster.kv_transfer.kv import FORMAT, LocalPool, demand
from tests.garbage import no_search_for_cycles

CALLS = 1 + 1 + 5
"""Of a fetch of 50 tokens: a choice, the prompt, five chunks."""


class Engine:
    """Takes events as the engine's thread does."""

    def __init__(self, connector: DecodeConnector) -> None:
        self.connector = connector
        self.seen: list[KVEvent] = []
        self._news = threading.Event()
        connector.attach(self._news.set)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, self.seen
            self._news.wait(0.05)
            self._news.clear()
            self.seen += self.connector.events()

    def completed(self) -> KVComplete:
        """Waits for the last event."""
        self.until(lambda: bool(self.seen) and isinstance(self.seen[-1], KVComplete))
        last = self.seen[-1]
        assert isinstance(last, KVComplete)
        return last

    def arrived(self, start: int = 0) -> int:
        """Up to which token KV has arrived, each with its own content."""
        for event in self.seen:
            if isinstance(event, KVArrived):
                assert event.start == start
                for share in event.payload.shares():
                    assert (share.data[0, 1, 0, :, 0] == range(event.start, event.end)).all()
                start = event.end
        return start


@contextmanager
def engine(
    pool: LocalPool,
    *,
    min_tokens: int = 20,
    timeout_s: float = 0.3,
    max_bytes: int = 1 << 30,
    backend: Backend | None = None,
) -> Iterator[Engine]:
    connector = DecodeConnector(
        "d",
        backend or KVBackend(FORMAT),
        lambda: pool,
        ObjectStoreTransport(checksums=True, min_bytes=pool.min_bytes),
        PrefillThreshold(min_tokens),
        TransferMetrics(Role.DECODE),
        max_bytes=max_bytes,
        timeout_s=timeout_s,
    )
    try:
        yield Engine(connector)
    finally:
        connector.close()


def failures(subject: Engine) -> dict[str, float]:
    counts = subject.connector.metrics().labelled["kv_transfer_failures"]
    return {reason: count for reason, count in counts.items() if count}


def test_all_kv_arrives_in_order_and_the_token_after_it_comes_last() -> None:
    pool = LocalPool(chunk_s=0.01)
    with engine(pool) as subject:
        assert subject.connector.fetch(demand(50, 8)) == 50
        assert subject.completed() == KVComplete(request_id="r", next_token_id=77, num_cached_tokens=4)
        assert subject.arrived(8) == 50
        assert failures(subject) == {}
    [order] = pool.orders
    assert order.num_bytes == 42 * FORMAT.bytes_per_token
    assert order.request.sampling == replace(demand(50).request.sampling, max_tokens=1)
    assert order.request.export_from == 8
    assert pool.closed == [order.request.request_id] != ["r"]


def test_a_short_suffix_is_not_worth_asking_for() -> None:
    with engine(LocalPool()) as subject:
        assert subject.connector.fetch(demand(50, 31)) is None
        assert subject.connector.fetch(demand(19)) is None


def test_of_a_request_that_goes_on_the_tokens_it_has_are_computed_too() -> None:
    asked = demand(50)
    resumed = KVDemand(request=asked.request, token_ids=(*asked.token_ids, 9, 8), num_cached_tokens=0, block_hashes=())
    pool = LocalPool()
    with engine(pool) as subject:
        assert subject.connector.fetch(resumed) == 52
        assert subject.completed().next_token_id == 77
        assert subject.arrived() == 52
    [order] = pool.orders
    assert order.request.prompt_token_ids == asked.token_ids
    assert order.request.output_token_ids == (9, 8)
    assert order.request.sampling.max_tokens == 3


@pytest.mark.parametrize("call", range(CALLS))
def test_wherever_prefill_dies_what_has_arrived_counts_and_the_engine_hears_it(call: int) -> None:
    pool = LocalPool(fails_at=call, chunk_s=0.002)
    with engine(pool) as subject:
        subject.connector.fetch(demand(50))
        last = subject.completed()
        assert last.next_token_id is None
        assert last.failure == "killed"
        assert subject.arrived() % 10 == 0
        assert failures(subject) == {"unavailable": 1}
        assert subject.connector.fetch(demand(50)) is None  # for a while, nobody is asked
    assert len(pool.closed) == len(pool.suspects) == (call > 0)


def test_the_end_of_one_of_several_prefill_replicas_is_no_reason_not_to_ask_the_others() -> None:
    with engine(LocalPool(fails_at=1, is_alone=False)) as subject:
        subject.connector.fetch(demand(50))
        assert subject.completed().failure == "killed"
        assert subject.connector.fetch(demand(50)) == 50


@pytest.mark.parametrize("call", range(CALLS))
def test_wherever_prefill_hangs_decode_waits_no_longer_than_its_deadline(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.kv_transfer.fetch.CHOICE_TIMEOUT_S", 0.1)
    with engine(LocalPool(hangs_at=call, chunk_s=0.002), timeout_s=0.1) as subject:
        started = time.monotonic()
        subject.connector.fetch(demand(50))
        assert subject.completed().failure
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("call", range(2, CALLS))
def test_a_lost_object_is_asked_for_once_more(call: int) -> None:
    with engine(LocalPool(fails_at=call, failure=PrefillError("lost", "evicted"), chunk_s=0.002)) as subject:
        subject.connector.fetch(demand(50))
        assert subject.completed().failure is None
        assert subject.arrived() == 50


class Receiving(KVBackend):
    """A replica to which KV does not come, so many times, from one call on."""

    def __init__(self, failure: KVLostError, *, first: int, times: int) -> None:
        super().__init__(FORMAT)
        self._failure = failure
        self._first = first
        self._times = times
        self._calls = itertools.count()

    def receive_blocks(self, payloads: Sequence[KVPayload], timeout_s: float) -> Sequence[KVPayload]:
        if self._first <= next(self._calls) < self._first + self._times:
            raise type(self._failure)(*self._failure.args)  # a new one: it holds what it came through
        return super().receive_blocks(payloads, timeout_s)


@pytest.mark.parametrize("first", range(5))
def test_kv_that_is_lost_on_its_way_is_asked_for_once_more(first: int) -> None:
    pool = LocalPool(chunk_s=0.002)
    with engine(pool, backend=Receiving(KVLostError("evicted"), first=first, times=1)) as subject:
        subject.connector.fetch(demand(50))
        assert subject.completed().failure is None
        assert subject.arrived() == 50
        assert failures(subject) == {}
    assert pool.suspects == []


@pytest.mark.parametrize(
    ("failure", "reason"), [(KVLostError("evicted"), "lost"), (KVLateError("not within 1 s"), "timeout")]
)
def test_kv_that_does_not_come_at_all_is_the_engines_to_compute(failure: KVLostError, reason: str) -> None:
    pool = LocalPool(chunk_s=0.01)
    with (
        no_search_for_cycles(),
        engine(pool, backend=Receiving(failure, first=2, times=100), timeout_s=5) as subject,
    ):
        subject.connector.fetch(demand(50))
        assert subject.completed().failure == str(failure)
        assert subject.arrived() == 20
        assert failures(subject) == {reason: 1}
        subject.seen.clear()
        eventually(lambda: not any(given() is not None for given in pool.given), 5)  # held in no cycle


def test_a_full_queue_at_prefill_is_no_reason_not_to_ask_again() -> None:
    pool = LocalPool(fails_at=1, failure=PrefillError("overloaded", "too many requests are waiting"))
    with engine(pool) as subject:
        subject.connector.fetch(demand(50))
        assert subject.completed().failure == "too many requests are waiting"
        assert subject.connector.fetch(demand(50)) == 50


def test_a_request_that_ends_gets_no_event_and_may_come_again_under_its_name() -> None:
    pool = LocalPool(chunk_s=0.02)
    with engine(pool) as subject:
        subject.connector.fetch(demand(50))
        subject.until(lambda: len(subject.seen) == 2)
        subject.connector.cancel("r")
        assert subject.connector.events() == []
        subject.seen.clear()
        subject.connector.fetch(demand(50, 8))
        assert subject.completed().next_token_id == 77
        assert subject.arrived(8) == 50
    assert len(pool.closed) == 2
    assert len(set(pool.closed)) == 2


class Slow(KVBackend):
    """KV takes its time from the object store to this replica."""

    def receive_blocks(self, payloads: Sequence[KVPayload], timeout_s: float) -> Sequence[KVPayload]:
        time.sleep(0.02)
        return super().receive_blocks(payloads, timeout_s)


@pytest.mark.parametrize("backend", [KVBackend, Slow])
@pytest.mark.parametrize("call", range(1, CALLS))
@pytest.mark.parametrize("fate", ["fails", "is cancelled"])
def test_a_fetch_that_ends_early_holds_its_kv_in_no_cycle(call: int, fate: str, backend: type[KVBackend]) -> None:
    """An idle engine's Python looks for cycles late or never, and knows nothing of what an object store holds. Nor does
    an error hold KV that somebody keeps, as the pool here does."""
    pool = LocalPool(**{"fails_at" if fate == "fails" else "hangs_at": call}, chunk_s=0.002)
    with no_search_for_cycles(), engine(pool, backend=backend(FORMAT), timeout_s=5) as subject:
        subject.connector.fetch(demand(50))
        if fate == "fails":
            subject.completed()
        else:
            eventually(lambda: pool.calls > call, 5)
            subject.connector.cancel("r")
        subject.seen.clear()
        subject.connector.events()
        eventually(lambda: subject.connector.metrics().values["kv_transfers_open"] == 0, 5)
        eventually(lambda: not any(given() is not None for given in pool.given), 5)
    assert len(pool.closed) == 1


def test_many_at_once_are_bounded_in_bytes_and_all_end() -> None:
    with engine(LocalPool(chunk_s=0.001), max_bytes=60 * FORMAT.bytes_per_token, timeout_s=5) as subject:
        for number in range(10):
            assert subject.connector.fetch(demand(50, name=f"r{number}")) == 50
        subject.until(lambda: sum(isinstance(event, KVComplete) for event in subject.seen) == 10)
        assert all(event.failure is None for event in subject.seen if isinstance(event, KVComplete))
        subject.until(lambda: subject.connector.metrics().values["kv_transfers_open"] == 0)
        assert subject.connector.metrics().values["kv_transfer_bytes_in_flight"] == 0


def test_the_threshold_is_where_computing_a_prompt_takes_as_long_as_having_it_computed() -> None:
    threshold = PrefillThreshold(None)
    assert threshold.tokens == FIRST_GUESS
    for _ in range(10):
        threshold.learn(num_computed=1000, compute_s=0.1, overhead_s=0.02)
    assert threshold.tokens == 200
    for _ in range(100):
        threshold.learn(num_computed=1000, compute_s=0.1, overhead_s=90)
    assert threshold.tokens == LARGEST
    fixed = PrefillThreshold(5)
    fixed.learn(num_computed=1000, compute_s=0.1, overhead_s=0.02)
    assert fixed.tokens == 5
