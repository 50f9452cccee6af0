"""Store and prefill pool together: the store's prefix first, and what is missing then from the pool if it pays."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.prefix_store.store_first import StoreFirst
from engine.kv_blocks import LocalPayload
from engine.kv_connector import KVArrived, KVComplete, KVConnector, KVDemand, KVEvent
from engine.request import EngineRequest, SamplingParams

PROMPT = 100
NO_KV = LocalPayload(blocks=())


class Scripted(KVConnector):
    """Says yes to demands of at least `least` missing tokens, and delivers up to token `upto`."""

    def __init__(self, *, least: int, upto: int) -> None:
        self.least = least
        self.upto = upto
        self.asked_from: list[int] = []
        self.cancelled: list[str] = []
        self.pending: list[KVEvent] = []

    def fetch(self, demand: KVDemand) -> int | None:
        start, name = demand.num_cached_tokens, demand.request.request_id
        self.asked_from.append(start)
        if PROMPT - start < self.least:
            return None
        if self.upto > start:
            self.pending.append(KVArrived(request_id=name, start=start, end=self.upto, payload=NO_KV))
        token = 7 if self.upto == PROMPT else None
        cached = self.upto if token is None else 0
        self.pending.append(KVComplete(request_id=name, next_token_id=token, num_cached_tokens=cached))
        return self.upto

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.pending = [event for event in self.pending if event.request_id != request_id]

    def events(self) -> Sequence[KVEvent]:
        events, self.pending = self.pending, []
        return events


def demand(cached: int = 0) -> KVDemand:
    tokens = tuple(range(PROMPT))
    request = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1))
    return KVDemand(request=request, token_ids=tokens, num_cached_tokens=cached, block_hashes=())


def test_the_pool_is_asked_for_what_the_store_does_not_have() -> None:
    store, pool = Scripted(least=1, upto=64), Scripted(least=20, upto=PROMPT)
    both = StoreFirst(store, pool)
    promised = both.fetch(demand())
    assert promised == PROMPT
    events = [*both.events(), *both.events()]
    assert [(e.start, e.end) for e in events if isinstance(e, KVArrived)] == [(0, 64), (64, PROMPT)]
    assert events[-1] == KVComplete(request_id="r", next_token_id=7, num_cached_tokens=64)
    assert sum(isinstance(event, KVComplete) for event in events) == 1
    assert pool.asked_from == [64]


def test_a_short_rest_is_computed_here() -> None:
    store, pool = Scripted(least=1, upto=96), Scripted(least=20, upto=PROMPT)
    both = StoreFirst(store, pool)
    assert both.fetch(demand())
    events = both.events()
    assert events[-1] == KVComplete(request_id="r", num_cached_tokens=96)
    assert len(events) == 2


def test_a_prompt_that_the_store_does_not_have_goes_to_the_pool_at_once() -> None:
    store, pool = Scripted(least=1000, upto=0), Scripted(least=20, upto=PROMPT)
    both = StoreFirst(store, pool)
    assert both.fetch(demand(cached=32)) == PROMPT
    assert pool.asked_from == [32]
    assert both.events()[-1] == KVComplete(request_id="r", next_token_id=7)
    assert both.fetch(demand(cached=90)) is None


def test_a_store_that_fails_leaves_the_whole_prompt_to_the_pool() -> None:
    store, pool = Scripted(least=1, upto=0), Scripted(least=20, upto=PROMPT)
    both = StoreFirst(store, pool)
    assert both.fetch(demand(cached=32))
    both.events()
    assert pool.asked_from == [32]


def test_a_request_that_has_ended_is_cancelled_wherever_it_is() -> None:
    store, pool = Scripted(least=1, upto=64), Scripted(least=20, upto=PROMPT)
    both = StoreFirst(store, pool)
    assert both.fetch(demand())
    both.cancel("r")
    assert not both.events()
    assert (store.cancelled, pool.cancelled) == (["r"], ["r"])
    assert both.fetch(demand())
    assert both.events()
