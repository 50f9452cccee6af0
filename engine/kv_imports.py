"""KVImports: requests whose KV comes from elsewhere, from the connector's promise until they get a place in the batch.

Such a request owns the blocks that its KV is written to, and no slot. A block becomes findable as soon as its content
is on its way to the device, because whoever reads it is dispatched later. What never comes, the request computes itself
once it has a slot.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv_blocks import KVLostError, KVPayload
from engine.kv_cache import BlockPool
from engine.kv_connector import KVArrived, KVComplete, KVConnector, KVDemand
from engine.metrics import EngineMetrics
from engine.request import RequestOutput, TokenLogprobs
from engine.running import RequestState, Status

logger = logging.getLogger(__name__)

TakeToken = Callable[[RequestState, int, TokenLogprobs | None], RequestOutput]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVExchange:
    """What an engine that exchanges KV has for it."""

    connector: KVConnector
    write_blocks: Callable[[Sequence[int], int, KVPayload], None]  # Backend.write_blocks


@dataclass(slots=True)
class _Import:
    state: RequestState
    end: int  # up to which token KV is promised
    arrived: int  # tokens whose KV is in the request's blocks, in the device's order


class KVImports:
    """The scheduler's book of them. Without an exchange nothing is ever fetched.

    Args:
        take_token: appends a sampled token to a request and gives its output; may finish the request.
    """

    def __init__(
        self,
        exchange: KVExchange | None,
        pool: BlockPool,
        *,
        block_size: int,
        caching: bool,
        metrics: EngineMetrics,
        take_token: TakeToken,
    ) -> None:
        self._exchange = exchange
        self._pool = pool
        self._block_size = block_size
        self._caching = caching
        self._metrics = metrics
        self._take_token = take_token
        self._unasked: OrderedDict[str, RequestState] = OrderedDict()  # in the order of waiting
        self._fetching: dict[str, _Import] = {}  # in the order of admission
        self._ready: dict[str, _Import] = {}  # nothing more comes; in the order of completion

    def __len__(self) -> int:
        """Requests that own blocks and no slot."""
        return len(self._fetching) + len(self._ready)

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetching)

    # -- requests that wait

    def consider(self, state: RequestState, *, first: bool = False) -> None:
        """A request has begun to wait: KV may be fetched for it, before or after that of the others who wait."""
        sampling = state.request.sampling
        if self._exchange is None or state.prompt_logprobs is not None or not sampling.max_tokens:
            return
        self._unasked[state.request_id] = state
        if first:
            self._unasked.move_to_end(state.request_id, last=False)

    def forget(self, state: RequestState) -> None:
        """It no longer waits."""
        self._unasked.pop(state.request_id, None)

    @property
    def next_unasked(self) -> RequestState | None:
        """Who waits longest without the connector having been asked."""
        return next(iter(self._unasked.values()), None)

    def begin(self, state: RequestState, num_cached_tokens: int) -> bool:
        """Asks the connector for the KV of a waiting request. If it says yes, the request needs its blocks at once."""
        assert self._exchange is not None  # else nobody is unasked
        del self._unasked[state.request_id]
        hashes = state.block_hashes(state.num_tokens // self._block_size, self._block_size)
        demand = KVDemand(
            request=state.request,
            token_ids=tuple(state.token_ids),
            num_cached_tokens=num_cached_tokens,
            block_hashes=hashes,
        )
        end = self._exchange.connector.fetch(demand)
        if end is None:
            return False
        self._fetching[state.request_id] = _Import(state, min(end, state.num_tokens), num_cached_tokens)
        return True

    # -- what arrives

    def take_events(self) -> list[RequestOutput]:
        """Writes what has arrived. Returns the first tokens that came along."""
        if self._exchange is None:
            return []
        outputs = []
        for event in self._exchange.connector.events():
            found = self._fetching.get(event.request_id)
            if found is None:
                continue  # it has ended since, or lost its blocks
            if isinstance(event, KVArrived):
                self._write(self._exchange, found, event)
            else:
                outputs += self._complete(found, event)
        return outputs

    def _write(self, exchange: KVExchange, found: _Import, event: KVArrived) -> None:
        size, blocks = self._block_size, found.state.block_ids
        try:
            if not found.arrived == event.start < event.end <= found.end:
                expected = f"{found.arrived} to {found.end}"
                raise KVLostError(f"KV of tokens {event.start} to {event.end} came where {expected} was expected")
            first, last = event.start // size, -(-event.end // size)
            exchange.write_blocks(blocks[first:last], event.start % size, event.payload)
        except KVLostError as error:
            exchange.connector.cancel(found.state.request_id)
            self._count_failure(found.state, str(error))
            self._make_ready(found)
            return
        found.arrived = event.end
        self._metrics.kv_imported_tokens += event.end - event.start
        # The last known token may have to be computed again, for its logits; nobody may share its block before.
        self._register(found, min(found.arrived, found.state.num_tokens - 1))

    def _register(self, found: _Import, num_tokens: int) -> None:
        state, count = found.state, num_tokens // self._block_size
        if not self._caching or count <= state.num_registered_blocks:
            return
        hashes = state.block_hashes(count, self._block_size)
        for index in range(state.num_registered_blocks, count):
            self._pool.register(state.block_ids[index], hashes[index])
        state.num_registered_blocks = count

    def _complete(self, found: _Import, event: KVComplete) -> list[RequestOutput]:
        state = found.state
        if event.failure is not None:
            self._count_failure(state, event.failure)
        self._make_ready(found)
        state.num_cached_tokens = max(state.num_cached_tokens, min(event.num_cached_tokens, state.prompt_len))
        token = event.next_token_id
        request = state.request
        lacks_logprobs = request.sampling.logprobs is not None and event.logprobs is None
        exports = request.export_from is not None  # which happens when a step computes its last token
        if token is None or found.arrived < state.num_tokens or lacks_logprobs or exports:
            return []
        self._register(found, found.arrived)
        return [self._take_token(state, token, event.logprobs)]

    def _count_failure(self, state: RequestState, problem: str) -> None:
        self._metrics.kv_import_failures += 1
        logger.warning("request %s computes its KV here: %s", state.request_id, problem)

    def _make_ready(self, found: _Import) -> None:
        del self._fetching[found.state.request_id]
        self._ready[found.state.request_id] = found

    # -- requests that leave

    @property
    def next_ready(self) -> tuple[RequestState, int] | None:
        """Who waits longest for a slot, and how many of its tokens are computed; one at least is left."""
        found = next(iter(self._ready.values()), None)
        return None if found is None else (found.state, min(found.arrived, found.state.num_tokens - 1))

    def placed(self, state: RequestState) -> None:
        """It has a slot."""
        del self._ready[state.request_id]

    @property
    def latest(self) -> RequestState | None:
        """Who would lose least by losing its blocks."""
        found = next(reversed(self._fetching.values()), None) or next(reversed(self._ready.values()), None)
        return None if found is None else found.state

    def drop(self, state: RequestState) -> None:
        """Takes everything from a request; what is still on its way to it counts no more."""
        assert state.status is Status.IMPORTING
        if self._fetching.pop(state.request_id, None) is None:
            del self._ready[state.request_id]
        elif self._exchange is not None:
            self._exchange.connector.cancel(state.request_id)
        self._pool.release(state.block_ids)
        state.block_ids = []
