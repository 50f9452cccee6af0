"""WaitingRoom: requests that have no slot: those that wait for one, and those whose KV is on its way here.

Requests are let in in the order of their arrival, with blocks for all their known tokens, as soon as there are enough;
what of them is in the prefix cache, or comes from elsewhere, is not computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.kv_cache import BlockPool
from engine.kv_imports import KVImports
from engine.limits import Limits
from engine.metrics import EngineMetrics
from engine.running import RequestState, Status


class WaitingRoom:
    """The scheduler's; it says how many requests are running, and which step has been collected last.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        pool: BlockPool,
        imports: KVImports,
        limits: Limits,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        block_size: int,
    ) -> None:
        self._pool = pool
        self._imports = imports
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._block_size = block_size
        self._waiting: OrderedDict[str, RequestState] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests that own nothing."""
        return len(self._waiting)

    @property
    def num_importing(self) -> int:
        """Requests that own blocks already."""
        return len(self._imports)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the requests that own nothing."""
        return sum([state.num_tokens for state in self._waiting.values()])

    def add(self, state: RequestState, *, first: bool = False) -> None:
        """A request comes; a preempted one before all others."""
        state.status = Status.WAITING
        self._waiting[state.request_id] = state
        if first:
            self._waiting.move_to_end(state.request_id, last=False)
        self._imports.consider(state, first=first)

    def leave(self, state: RequestState) -> None:
        """A request ends, or loses its blocks."""
        if state.status is Status.IMPORTING:
            self._imports.drop(state)
        else:
            del self._waiting[state.request_id]
            self._imports.forget(state)

    def begin_imports(self, num_running: int, last_collected: int) -> None:
        """Has KV fetched for requests that wait, in their order, as far as there are blocks for it."""
        while len(self._imports) < self._limits.running:
            state = self._imports.next_unasked
            if state is None or state.last_step > last_collected:
                return
            front = next(iter(self._waiting.values()))
            if front is not state and not self._has_room(self._find_prefix(front), front.num_tokens, num_running):
                return  # who waits for blocks gets them first
            cached = self._find_prefix(state)
            num_tokens = min(state.num_tokens + 1, state.last_kv_len)  # the next token may come along
            if not self._has_room(cached, num_tokens, num_running):
                return
            if self._imports.begin(state, len(cached) * self._block_size):
                self._give_blocks(state, cached, num_tokens)
                state.status = Status.IMPORTING

    def let_in(
        self, fits: Callable[[int], bool], num_running: int, last_collected: int
    ) -> tuple[RequestState, int] | None:
        """Who gets the next slot, with blocks for its known tokens, and how many of these are computed.

        Args:
            fits: whether so many tokens that are not computed fit into the step.
        """
        return self._imported(fits) or self._admitted(fits, num_running, last_collected)

    def _imported(self, fits: Callable[[int], bool]) -> tuple[RequestState, int] | None:
        """The first request whose KV has come; it comes before all that wait."""
        found = self._imports.next_ready
        if found is None or not fits(found[0].num_tokens - found[1]):
            return None
        self._imports.placed(found[0])
        return found

    def _admitted(
        self, fits: Callable[[int], bool], num_running: int, last_collected: int
    ) -> tuple[RequestState, int] | None:
        """The request that waits longest."""
        state = next(iter(self._waiting.values()), None)
        if state is None or state.last_step > last_collected:
            return None  # its last token before a preemption is still in flight
        cached = self._find_prefix(state)
        num_cached_tokens = len(cached) * self._block_size
        if not self._has_room(cached, state.num_tokens, num_running) or not fits(state.num_tokens - num_cached_tokens):
            return None
        self._give_blocks(state, cached, state.num_tokens)
        return state, num_cached_tokens

    def _has_room(self, cached: list[int], num_tokens: int, num_running: int) -> bool:
        """Whether there are blocks for so many tokens, of which those of `cached` are in the cache."""
        new_blocks = -(-num_tokens // self._block_size) - len(cached)
        # One more block for everybody, so that the next steps don't preempt it again.
        headroom = num_running + len(self._imports)
        return self._pool.num_free_without(cached) >= new_blocks + headroom

    def _find_prefix(self, state: RequestState) -> list[int]:
        """Registered blocks of the request's prefix; at least one token is left to compute, for its logits."""
        if not self._limits.caching or state.prompt_logprobs is not None:
            return []
        return self._pool.find(state.block_hashes((state.num_tokens - 1) // self._block_size, self._block_size))

    def _give_blocks(self, state: RequestState, cached: list[int], num_tokens: int) -> None:
        """Gives a waiting request blocks for so many tokens."""
        del self._waiting[state.request_id]
        self._imports.forget(state)
        self._pool.share(cached)
        new_blocks = -(-num_tokens // self._block_size) - len(cached)
        state.block_ids = cached + self._pool.allocate(new_blocks)
        state.num_registered_blocks = len(cached)
        if not state.admission_time:
            self._record_first_admission(state, len(cached) * self._block_size)

    def _record_first_admission(self, state: RequestState, num_cached_tokens: int) -> None:
        state.admission_time = self._clock()
        state.num_cached_tokens = min(num_cached_tokens, state.prompt_len // self._block_size * self._block_size)
        if self._limits.caching and state.prompt_logprobs is None:
            self._metrics.prefix_cache_queries += state.num_tokens
            self._metrics.prefix_cache_hits += num_cached_tokens
        self._metrics.request_queue_time_seconds.observe(state.admission_time - state.arrival_time)
