"""KVConnector: how KV that was computed elsewhere comes into an engine, and how an engine's own KV leaves it.

Prefill replicas and the cluster's prefix store are both connectors. The engine calls them on its own thread and never
waits for them: they answer with events. A request whose KV is being fetched owns the blocks that it will fill, and no
slot; what fails to come, the engine computes itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv_blocks import KVPayload, PendingBlocks
from engine.metrics import MetricsSnapshot
from engine.request import EngineRequest, TokenLogprobs

NO_METRICS = MetricsSnapshot(values={}, labelled={}, histograms={})


@dataclass(frozen=True, kw_only=True, slots=True)
class KVDemand:
    """A request at its admission, and what of it is computed."""

    request: EngineRequest
    token_ids: tuple[int, ...]  # prompt, and output tokens known already
    num_cached_tokens: int  # KV of so many first tokens is here
    block_hashes: Sequence[bytes]  # of all full blocks of token_ids, this engine's block size


@dataclass(frozen=True, kw_only=True, slots=True)
class KVArrived:
    """KV of tokens start .. end - 1. A request's arrive in order and without gaps, up to what `fetch` promised."""

    request_id: str
    start: int
    end: int
    payload: KVPayload  # as Backend.receive_blocks gave it


@dataclass(frozen=True, kw_only=True, slots=True)
class KVComplete:
    """No more KV comes for this request: all has arrived, or the rest never will. The engine computes what is missing.

    With `next_token_id`, the KV of all known tokens has arrived, and the token after them was sampled along. The engine
    samples it itself if `logprobs` are missing, or for a request with `export_from`.
    """

    request_id: str
    next_token_id: int | None = None
    logprobs: TokenLogprobs | None = None  # of it, if asked for
    num_cached_tokens: int = 0  # of the prompt's first tokens, how many needed no computing elsewhere either
    failure: str | None = None  # one line, for log and metrics


KVEvent = KVArrived | KVComplete


@dataclass(frozen=True, kw_only=True, slots=True)
class KVExport:
    """KV that leaves: tokens start .. end - 1 of a request, as a step's chunk has computed them."""

    request_id: str
    start: int
    end: int
    blocks: PendingBlocks
    block_hashes: Sequence[bytes]  # of the full blocks among them


class KVConnector(ABC):
    """All methods run on the engine's thread and return at once."""

    def attach(self, wake: Callable[[], None]) -> None:  # noqa: B027
        """The engine is loaded. `wake` may be called from any thread when there are events to take."""

    def fetch(self, demand: KVDemand) -> int | None:  # noqa: ARG002
        """Begins to fetch KV of tokens from `num_cached_tokens` on; says up to which token, or None to fetch nothing.

        Asked once for each time a request is admitted. Events follow: KVArrived any number of times, then KVComplete
        once, unless `cancel` comes first.
        """
        return None

    def cancel(self, request_id: str) -> None:  # noqa: B027
        """The request has ended, lost its blocks, or gives up. `events` gives none any more that comes of this `fetch`.

        Comes once for a fetch that is not complete, and maybe after the engine has been given its KVComplete.

        The request may be fetched again, under the same id, if it has to be computed again.
        """

    @abstractmethod
    def events(self) -> Sequence[KVEvent]:
        """What has happened since the last call."""

    def exported(self, export: KVExport) -> None:  # noqa: B027
        """Takes KV that a request with `export_from` has computed, chunk after chunk."""

    def evicted(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:  # noqa: B027
        """Takes full blocks that the next step overwrites, those for which `keeps` said so, one behind the other."""

    def computed(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:  # noqa: B027
        """Takes full prompt blocks that this engine has just computed, those for which `keeps` said so.

        They may be of several requests. Comes only if `wants_computed`.
        """

    def keeps(self, block_hash: bytes) -> bool:  # noqa: ARG002
        """Whether a block that was computed, or is about to be overwritten, should be read out.

        Each yes is followed by `computed` or `evicted` with that block.
        """
        return False

    wants_computed: bool = False
    """Whether `keeps` is asked about blocks that were computed, too."""

    def metrics(self) -> MetricsSnapshot:
        """What is measured here, beside the engine's own; any thread."""
        return NO_METRICS

    def close(self) -> None:  # noqa: B027
        """Ends what is under way. Nothing else is called afterwards."""
