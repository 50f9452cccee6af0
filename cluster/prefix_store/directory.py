"""Directory: which block of which chain lies in which object, and what is given up when a node's share is full.

Plain Python without Ray. A *segment* is one object with the KV of several blocks; it is added and given up as a whole,
least recently used first, and a chain's tail before its head (a head without tail is still useful, a tail without head
is not found). The memory is bounded per node, as objects stay on the node where they were computed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.prefix_store.history import History
from cluster.prefix_store.messages import Changes, Offer, Run, Version

SEGMENT_OVERHEAD_BYTES = 4096
BLOCK_OVERHEAD_BYTES = 256
"""What directory and object store need themselves; without it, tiny blocks could be without number."""

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment(Generic[Content]):
    offer: Offer
    content: Content
    cost: int  # bytes, overhead included


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    segment: int
    index: int  # block within the segment


class Directory(Generic[Content]):
    """Not thread-safe. `Content` is whatever keeps a segment's memory alive: dropping it frees the memory."""

    def __init__(self, epoch: bytes) -> None:
        self._epoch = epoch
        self._ids = itertools.count()
        self._segments: dict[int, _Segment[Content]] = {}
        self._places: defaultdict[bytes, dict[bytes, _Place]] = defaultdict(dict)  # space -> block hash -> place
        self._histories: defaultdict[bytes, History] = defaultdict(History)
        self._used: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)  # node -> least recent first
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._limits: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._places.values()))

    @property
    def used_bytes(self) -> int:
        """Of all nodes, with what directory and object store need themselves."""
        return sum(self._bytes.values())

    def limit(self, node: str, num_bytes: int) -> None:
        """Sets how many bytes a node holds at most; gives up what is beyond."""
        self._limits[node] = num_bytes
        self._make_room(node, 0)

    def wants(self, offer: Offer) -> bool:
        """Whether an offer has a block that is not here, and fits its node."""
        places = self._places[offer.space]
        return _cost(offer) <= self._limits.get(offer.node, 0) and any(h not in places for h in offer.block_hashes)

    def add(self, offer: Offer, content: Content) -> bool:
        """Takes a segment if it is wanted, giving up as much of its node as it needs."""
        if not self.wants(offer):
            return False
        cost = _cost(offer)
        self._make_room(offer.node, cost)
        segment = next(self._ids)
        self._segments[segment] = _Segment(offer=offer, content=content, cost=cost)
        self._used[offer.node][segment] = None
        self._bytes[offer.node] += cost
        places, history = self._places[offer.space], self._histories[offer.space]
        for index, block_hash in enumerate(offer.block_hashes):
            if block_hash not in places:
                places[block_hash] = _Place(segment=segment, index=index)
                history.added(block_hash)
        self._touch([segment])
        return True

    def find(self, space: bytes, block_hashes: Sequence[bytes]) -> list[Run]:
        """Where the longest beginning of a chain lies that is all here; it counts as used now."""
        places = self._places.get(space, {})
        runs: list[Run] = []
        for place in _while_found(places, block_hashes):
            last = runs[-1] if runs else None
            if last is not None and place == _Place(segment=last.segment, index=last.first + last.count):
                runs[-1] = Run(segment=last.segment, first=last.first, count=last.count + 1)
            else:
                runs.append(Run(segment=place.segment, first=place.index, count=1))
        self._touch([run.segment for run in runs])
        return runs

    def content(self, segment: int) -> Content:
        return self._segments[segment].content

    def drop(self, segment: int) -> None:
        """Forgets a segment, if it is still here."""
        dropped = self._segments.pop(segment, None)
        if dropped is None:
            return
        offer = dropped.offer
        del self._used[offer.node][segment]
        self._bytes[offer.node] -= dropped.cost
        places, history = self._places[offer.space], self._histories[offer.space]
        for block_hash in offer.block_hashes:
            place = places.get(block_hash)
            if place is not None and place.segment == segment:
                del places[block_hash]
                history.removed(block_hash)

    def version(self, space: bytes) -> Version:
        return Version(epoch=self._epoch, number=self._histories[space].number)

    def changes(self, space: bytes, since: Version) -> Changes:
        """What a replica that knows version `since` must learn."""
        now, used = self.version(space), self.used_bytes
        events = self._histories[space].since(since.number) if since.epoch == self._epoch else None
        if events is None:
            return Changes(version=now, whole=True, used_bytes=used, added=tuple(self._places[space]))
        added, removed = events
        return Changes(version=now, whole=False, used_bytes=used, added=added, removed=removed)

    def _make_room(self, node: str, cost: int) -> None:
        used = self._used[node]
        while used and self._bytes[node] + cost > self._limits[node]:
            self.drop(next(iter(used)))

    def _touch(self, chain: Sequence[int]) -> None:
        """Marks segments of a chain, first to last, as just used, and those before them: the first of all latest."""
        for segment in reversed(chain):
            self._mark(segment)
        for segment in self._ancestors(chain[0]) if chain else ():
            self._mark(segment)

    def _mark(self, segment: int) -> None:
        self._used[self._segments[segment].offer.node].move_to_end(segment)

    def _ancestors(self, segment: int) -> Iterator[int]:
        """The segments before one in its chain, as far as they are here; nearest first."""
        seen = {segment}  # segments that mix chains can be each other's ancestors
        while True:
            offer = self._segments[segment].offer
            place = self._places[offer.space].get(offer.parent) if offer.parent is not None else None
            if place is None or place.segment in seen:
                return
            segment = place.segment
            seen.add(segment)
            yield segment


def _cost(offer: Offer) -> int:
    return offer.num_bytes + SEGMENT_OVERHEAD_BYTES + BLOCK_OVERHEAD_BYTES * len(offer.block_hashes)


def _while_found(places: dict[bytes, _Place], block_hashes: Sequence[bytes]) -> Iterator[_Place]:
    for block_hash in block_hashes:
        place = places.get(block_hash)
        if place is None:
            return
        yield place
