"""Fleet: all that one router knows of its replicas. Not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cluster.routing.chain import PrefixChain
from cluster.routing.prefix_index import PrefixIndex, PrefixMatch
from cluster.routing.view import ReplicaView
from engine.news import EngineLoad
from engine.request import EngineRequest

ASSUMED_S = 30.0
"""How long a prefix that was sent to a replica counts as being there, if its engine does not say so."""
MAX_ASSUMED_BLOCKS = 16384
"""Per replica."""
MAX_ASSUMED_AHEAD = 256
"""Blocks of one prompt, beyond those that some replica has, that are hashed to know them again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request in search of a replica."""

    request: EngineRequest
    num_tokens: int
    block_size: int
    now: float
    chain: PrefixChain | None  # None: the router does not look at prefixes
    match: PrefixMatch = field(default_factory=lambda: PrefixMatch([]))
    session: str = ""  # requests with the same one should meet again; empty: none

    def uncached_tokens(self, replica: ReplicaView) -> int:
        """Tokens that this replica would have to compute."""
        return self.num_tokens - self.match.num_blocks(replica.bit) * self.block_size


class Fleet:
    def __init__(
        self,
        *,
        block_size: int,
        prefixes: bool = True,
        assumed_s: float = ASSUMED_S,
        max_assumed_blocks: int = MAX_ASSUMED_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            block_size: the engines'.
            prefixes: whether to keep track of what replicas have cached.
            assumed_s: where engines send no news, as long as a prefix is likely to stay cached.
            max_assumed_blocks: where engines send no news, the blocks that a replica has.
        """
        self._block_size = block_size
        self.prefixes = prefixes
        self._assumed_s = assumed_s
        self._clock = clock
        self._index = PrefixIndex(max_assumed_blocks)
        self._views: dict[str, ReplicaView] = {}

    # -- questions

    def ask(self, request: EngineRequest, session: str = "") -> Question:
        """The question where a request should go, for a policy to answer."""
        chain = PrefixChain(request, self._block_size) if self.prefixes else None
        return Question(
            request=request,
            num_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            block_size=self._block_size,
            now=self._clock(),
            chain=chain,
            match=PrefixMatch([]) if chain is None else self._index.match(chain),
            session=session,
        )

    def views(self, names: Iterable[str]) -> list[ReplicaView]:
        """The replicas of these names, new ones included."""
        return [self._view(name) for name in names]

    def keep(self, names: Iterable[str]) -> None:
        """Forgets all other replicas, unless requests of this router are open there."""
        wanted = set(names)
        for name in [name for name, view in self._views.items() if name not in wanted and view.is_idle]:
            self._index.leave(self._views.pop(name).bit)

    # -- this router's own requests

    def sent(self, replica: str, question: Question) -> None:
        """The request has left for this replica."""
        view = self._view(replica)
        view.sent(question.request.request_id, question.uncached_tokens(view))
        chain = question.chain
        if chain is not None:
            count = min(chain.num_blocks, len(question.match.holders) + MAX_ASSUMED_AHEAD)
            now = self._clock()
            hashes = (chain[index] for index in range(count))
            self._index.assume(view.bit, hashes, now=now, until=now + self._assumed_s)

    def prefilled(self, replica: str, request_id: str) -> None:
        """The request's first token has come."""
        if replica in self._views:
            self._views[replica].prefilled(request_id)

    def ended(self, replica: str, request_id: str) -> None:
        """The request is at this replica no longer."""
        if replica in self._views:
            self._views[replica].ended(request_id)

    # -- news

    def load_is(self, replica: str, load: EngineLoad) -> None:
        self._view(replica).load_is(load, self._clock())

    def cache_is(self, replica: str, hashes: Iterable[bytes]) -> None:
        """All short hashes of blocks that a replica has."""
        view = self._view(replica)
        self._index.leave(view.bit)
        view.bit = self._index.join()
        if self.prefixes:
            self._index.add(view.bit, hashes)

    def cache_changed(self, replica: str, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Short hashes of blocks that a replica has from now on, and of others that it no longer has."""
        if self.prefixes:
            view = self._view(replica)
            self._index.add(view.bit, added)
            self._index.discard(view.bit, removed)

    def lost(self, replica: str) -> None:
        """No news comes from this replica any more; it may be gone, or come back with an empty cache."""
        if replica in self._views:
            self._views[replica].silent()
            self.cache_is(replica, ())

    def _view(self, name: str) -> ReplicaView:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = ReplicaView(name, self._index.join())
        return view
