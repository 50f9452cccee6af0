"""What a decode and a prefill replica say to each other in Serve calls.

The formats leave room for what comes later: a request carries its adapter itself, quantized KV is another dtype in the
`KVFormat` of each share, and further state (scales, a draft model's KV) is a further section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.gang.kv import HeldKV
from cluster.messages import Destination
from engine.kv_blocks import KVBlocks
from engine.request import EngineRequest, TokenLogprobs

MAIN = "main"
"""The section with the model's own keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTicket(Destination):
    """What every call of a transfer begins with."""

    transfer: str  # unique: decode replica and number


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOrder:
    """A prompt to compute. Its KV from `request.export_from` on is fetched chunk by chunk; a token is sampled after it.

    Of a request that goes on after an interruption, the tokens that it has already are computed like the prompt.
    `request` is the decode side's, with a name and a limit of tokens of its own: seed, penalties, bans and log
    probabilities are the same, so that the token is what the decode replica would have sampled.
    """

    request: EngineRequest
    num_bytes: int  # of the KV that is to be transferred


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillAnswer:
    """The prompt is computed."""

    next_token_id: int
    logprobs: TokenLogprobs | None
    num_cached_tokens: int  # of the prompt, found in the prefill replica's prefix cache
    compute_s: float  # from the engine having the request to the token
    total_s: float  # from the call's arrival to this answer


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPiece:
    """KV of tokens start .. end - 1: either the data itself, or where it is."""

    start: int
    end: int
    sections: Mapping[str, tuple[KVBlocks, ...]]  # whose shares hold all heads together
    checksum: int | None = None  # CRC-32 of all data, where configured
    held: tuple[HeldTokens, ...] = ()  # hosts of a gang that have the main section's

    @property
    def num_bytes(self) -> int:
        data = sum(share.data.nbytes for section in self.sections.values() for share in section)
        return data + sum(tokens.num_bytes for tokens in self.held)

    @property
    def object_bytes(self) -> int:
        """Of the largest object that it adds to."""
        return max(tokens.num_bytes for tokens in self.held) if self.held else self.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTokens:
    """Tokens first .. end - 1 of what a host of a gang has."""

    kv: HeldKV
    first: int
    end: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.first) * self.kv.bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class KVChunk:
    """Consecutive pieces: one object of the object store, or one of each host of a gang."""

    pieces: tuple[KVPiece, ...]
    waited_s: float = 0.0  # how long the call waited for it to be computed

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoChunk:
    """There is no such chunk: the prompt's KV ends before it, or the transfer has failed."""

    failure: str | None = None
