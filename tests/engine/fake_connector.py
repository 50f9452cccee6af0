"""FakeConnector: brings KV of the mock backend in pieces, late, in part or not at all, and checks how it is used."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.mock import mock_tokens
from backends.mock.device import powers
from backends.mock.kv_exchange import FORMAT
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload, LocalPayload, PendingBlocks
from engine.kv_connector import KVArrived, KVComplete, KVConnector, KVDemand, KVEvent, KVExport
from engine.request import TokenLogprobs

Words = NDArray[np.uint32]


def mock_kv(token_ids: Sequence[int]) -> Words:
    """The KV of a sequence, [1, 2, 1, tokens, 1]."""
    entries = np.cumsum((np.array(token_ids, np.uint64) + np.uint64(1)) * powers(len(token_ids)), dtype=np.uint64)
    return (
        np.stack([entries & np.uint64(0xFFFFFFFF), entries >> np.uint64(32)]).astype(np.uint32).reshape(1, 2, 1, -1, 1)
    )


def payload(data: Words) -> LocalPayload:
    return LocalPayload(blocks=(KVBlocks(format=FORMAT, heads=range(1), data=np.ascontiguousarray(data)),))


class LostPayload(KVPayload):
    def shares(self) -> Sequence[KVBlocks]:
        raise KVLostError("the object is lost")


@dataclass(kw_only=True)
class Behaviour:
    """How a fetch goes."""

    sizes: Sequence[int] = (1000,)  # of the pieces, in tokens; the last one for all the rest
    leaves_out: int = 0  # tokens at the end that never come
    lost: int | None = None  # which piece is lost
    gap: int | None = None  # which piece begins one token too late
    first_token: bool = True
    failure: str | None = None


@dataclass(kw_only=True)
class Exported:
    """What was handed out of one request, in order."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    pending: list[PendingBlocks] = field(default_factory=list)

    @property
    def data(self) -> Words:
        return np.concatenate([part.result()[0].data for part in self.pending], axis=3)


class FakeConnector(KVConnector):
    """
    Args:
        behave: how a fetch goes; None: it is declined.
        eos: the mock backend's end-of-sequence token, and every how many tokens it comes.
    """

    wants_computed = True

    def __init__(
        self, behave: Callable[[KVDemand], Behaviour | None] = lambda _: Behaviour(), *, eos: tuple[int, int] = (2, 0)
    ) -> None:
        self.behave = behave
        self.eos = eos
        self.demands: list[KVDemand] = []
        self.cancelled: list[str] = []
        self.pending: dict[str, deque[KVEvent]] = {}  # of open fetches, what is still on its way
        self.arrived: list[KVEvent] = []
        self.exports: dict[str, Exported] = {}
        self.by_hash: dict[bytes, Words] = {}
        self.num_evicted = 0
        self.wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def fetch(self, demand: KVDemand) -> int | None:
        name = demand.request.request_id
        assert name not in self.pending, "fetched twice"
        self.demands.append(demand)
        behaviour = self.behave(demand)
        if behaviour is None:
            return None
        self.pending[name] = deque(self._events(demand, behaviour))
        return len(demand.token_ids)

    def _events(self, demand: KVDemand, behaviour: Behaviour) -> list[KVEvent]:
        name, tokens = demand.request.request_id, demand.token_ids
        data, events = mock_kv(tokens), []
        start, last = demand.num_cached_tokens, len(tokens) - behaviour.leaves_out
        sizes = list(behaviour.sizes)
        while start < last:
            end = min(last, start + (sizes.pop(0) if len(sizes) > 1 else max(sizes[0], 1)))
            piece: KVPayload = LostPayload() if len(events) == behaviour.lost else payload(data[:, :, :, start:end])
            first = start + 1 if len(events) == behaviour.gap else start
            events.append(KVArrived(request_id=name, start=first, end=end, payload=piece))
            start = end
        token = self._next_token(demand) if behaviour.first_token else None
        logprobs = None if token is None else TokenLogprobs(token_id=token, logprob=-0.5, top=())
        complete = KVComplete(request_id=name, next_token_id=token, logprobs=logprobs, failure=behaviour.failure)
        return [*events, complete]

    def _next_token(self, demand: KVDemand) -> int:
        request = demand.request
        known = len(demand.token_ids) - len(request.prompt_token_ids)
        return mock_tokens(
            request.prompt_token_ids,
            known + 1,
            seed=request.sampling.seed if request.sampling.temperature else 0,
            eos_token_id=self.eos[0],
            eos_every=self.eos[1],
            min_tokens=request.sampling.min_tokens,
        )[-1]

    def cancel(self, request_id: str) -> None:
        self.pending.pop(request_id, None)
        self.arrived = [event for event in self.arrived if event.request_id != request_id]
        self.cancelled.append(request_id)

    def release(self, rng: random.Random, count: int) -> None:
        """Lets some of what is on its way arrive, in order for each request."""
        for _ in range(count):
            open_ones = [name for name, events in self.pending.items() if events]
            if not open_ones:
                return
            self.arrived.append(self.pending[rng.choice(open_ones)].popleft())
        self.wake()

    def release_all(self) -> None:
        self.release(random.Random(0), 1_000_000)
        self.wake()

    def events(self) -> Sequence[KVEvent]:
        arrived, self.arrived = self.arrived, []
        for event in arrived:
            if isinstance(event, KVComplete):
                del self.pending[event.request_id]
        return arrived

    def exported(self, export: KVExport) -> None:
        exported = self.exports.setdefault(export.request_id, Exported())
        exported.ranges.append((export.start, export.end))
        exported.pending.append(export.blocks)

    def keeps(self, block_hash: bytes) -> bool:
        return block_hash[0] % 2 == 0

    def computed(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        for known_as, data in self._by_block(block_hashes, blocks):
            assert known_as not in self.by_hash or np.array_equal(self.by_hash[known_as], data)
            self.by_hash[known_as] = data

    def evicted(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        for known_as, data in self._by_block(block_hashes, blocks):
            assert self.keeps(known_as)
            self.num_evicted += 1
            if known_as in self.by_hash:
                assert np.array_equal(self.by_hash[known_as], data), (
                    "an evicted block was overwritten before it was read"
                )

    def _by_block(self, hashes: Sequence[bytes], blocks: PendingBlocks) -> list[tuple[bytes, Words]]:
        data = blocks.result()[0].data
        return list(zip(hashes, np.split(data, len(hashes), axis=3), strict=True))
