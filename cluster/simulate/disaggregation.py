"""Prefill and decode pools in virtual time: the engine's own KV exchange, over links with a bandwidth and a latency.

Decode engines have a connector that gives prompts to the prefill pool, prefill engines one that hears of the chunks as
they are dispatched. A chunk leaves when its step is done and when both replicas' links are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.simulate.engine import SAMPLED
from cluster.simulate.kv import NoPayload
from cluster.simulate.replicas import DoneAt, Pool, Replica
from cluster.simulate.timeline import Timeline
from engine.kv_connector import KVArrived, KVComplete, KVConnector, KVDemand, KVEvent, KVExport
from engine.request import EngineRequest, RequestOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """How KV gets from one replica to another."""

    bytes_per_s: float  # of each replica, either way
    latency_s: float  # of a chunk, calls included
    bytes_per_token: float

    def seconds(self, num_tokens: int) -> float:
        return num_tokens * self.bytes_per_token / self.bytes_per_s


class SimulatedPrefillConnector(KVConnector):
    """A prefill engine's: tells the courier which chunks have been dispatched."""

    def __init__(self, courier: Courier, done_at: DoneAt) -> None:
        self._courier = courier
        self.done_at = done_at
        self.link_free_at = 0.0

    def events(self) -> Sequence[KVEvent]:
        return ()

    def exported(self, export: KVExport) -> None:
        self._courier.exported(self, export)


class SimulatedDecodeConnector(KVConnector):
    """A decode engine's: has long prompts computed elsewhere."""

    def __init__(self, courier: Courier, threshold: PrefillThreshold) -> None:
        self._courier = courier
        self._threshold = threshold
        self._events: list[KVEvent] = []
        self._wake: Callable[[], None] = lambda: None
        self._orders: dict[str, Order] = {}
        self.link_free_at = 0.0

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def fetch(self, demand: KVDemand) -> int | None:
        num_tokens = len(demand.token_ids)
        if num_tokens - demand.num_cached_tokens < max(1, self._threshold.tokens):
            return None
        order = self._courier.order(self, demand)
        if order is not None:
            self._orders[demand.request.request_id] = order
        return None if order is None else num_tokens

    def cancel(self, request_id: str) -> None:
        self._courier.give_up(self._orders.pop(request_id))
        self._events = [event for event in self._events if event.request_id != request_id]

    def events(self) -> Sequence[KVEvent]:
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, KVComplete):
                del self._orders[event.request_id]
        return events

    def happened(self, event: KVEvent) -> None:
        self._events.append(event)
        self._wake()

    def learn(self, num_computed: int, compute_s: float, overhead_s: float) -> None:
        self._threshold.learn(num_computed=num_computed, compute_s=compute_s, overhead_s=overhead_s)


@dataclass(slots=True, eq=False)
class Order:
    """One prompt on its way through the prefill pool."""

    name: str
    decode: SimulatedDecodeConnector
    request_id: str  # the decode engine's
    num_tokens: int
    num_cached_tokens: int  # at the decode engine
    ordered_at: float
    arrived_at: float  # when the last chunk so far is there
    is_open: bool = True


class Courier:
    """Between the pools. Listens to the prefill pool."""

    def __init__(self, timeline: Timeline, link: LinkModel) -> None:
        self._timeline = timeline
        self._link = link
        self._orders: dict[str, Order] = {}
        self._num_orders = 0
        self.pool: Pool

    def order(self, decode: SimulatedDecodeConnector, demand: KVDemand) -> Order | None:
        """Gives a prompt to the prefill pool; None if it has no replica."""
        if not self.pool.num_ready:
            return None
        now = self._timeline.now
        self._num_orders += 1
        order = Order(
            name=f"p{self._num_orders}",
            decode=decode,
            request_id=demand.request.request_id,
            num_tokens=len(demand.token_ids),
            num_cached_tokens=demand.num_cached_tokens,
            ordered_at=now,
            arrived_at=now,
        )
        self._orders[order.name] = order
        request = EngineRequest(
            request_id=order.name,
            prompt_token_ids=demand.token_ids,
            sampling=replace(demand.request.sampling, max_tokens=1),
            export_from=demand.num_cached_tokens,
            arrival_time=now,
        )
        self._timeline.after(self._link.latency_s, lambda: self._submit(order, request))
        return order

    def _submit(self, order: Order, request: EngineRequest) -> None:
        if order.is_open:
            self.pool.submit(request)

    def give_up(self, order: Order) -> None:
        order.is_open = False
        self._orders.pop(order.name, None)

    def exported(self, prefill: SimulatedPrefillConnector, export: KVExport) -> None:
        """A chunk has been dispatched."""
        order = self._orders.get(export.request_id)
        if order is None:
            return
        begin = max(prefill.done_at(), prefill.link_free_at, order.decode.link_free_at)
        seconds = self._link.seconds(export.end - export.start)
        prefill.link_free_at = order.decode.link_free_at = begin + seconds
        order.arrived_at = begin + seconds + self._link.latency_s
        arrived = KVArrived(request_id=order.request_id, start=export.start, end=export.end, payload=NoPayload())
        self._timeline.at(order.arrived_at, lambda: self._tell(order, arrived))

    def _tell(self, order: Order, event: KVEvent) -> None:
        if order.is_open:
            order.is_open = isinstance(event, KVArrived)
            order.decode.happened(event)

    # -- what the prefill pool tells

    def yielded(self, replica: Replica, output: RequestOutput) -> None:  # noqa: ARG002
        order = self._orders.get(output.request_id)
        if order is None or output.finish_reason is None:
            return
        del self._orders[order.name]
        now = self._timeline.now
        done_at = max(now + self._link.latency_s, order.arrived_at)
        computed = order.num_tokens - max(order.num_cached_tokens, output.num_cached_tokens)
        order.decode.learn(computed, now - order.ordered_at - self._link.latency_s, done_at - now)
        complete = KVComplete(
            request_id=order.request_id, next_token_id=SAMPLED, num_cached_tokens=output.num_cached_tokens
        )
        self._timeline.at(done_at, lambda: self._tell(order, complete))

    def refused(self, request_id: str) -> None:
        """A full queue, or a replica that failed: the decode engine computes the rest."""
        order = self._orders.pop(request_id, None)
        if order is not None:
            self._tell(order, KVComplete(request_id=order.request_id, failure="the prefill replica is gone"))
