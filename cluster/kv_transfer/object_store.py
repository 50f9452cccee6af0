"""ObjectStoreTransport: KV as results of Ray calls, in contiguous integer arrays.

Ray writes such arrays to shared memory in one copy and hands out views of it without any. As results of calls that the
decode side made, the objects belong to it: they outlive the prefill replica.

A prefill replica on one host answers with the data. A gang's leader does not have it: its answer says which hosts do,
and the decode replica asks each of them for what each of its own hosts needs. So every byte goes from one host to one
other, or to those that keep the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import ray

from cluster.gang.kv import GangBlocks, HeldKV, KVSlice
from cluster.kv_objects import fetched
from cluster.kv_transfer.messages import MAIN, HeldTokens, KVChunk, KVPiece
from cluster.kv_transfer.transport import Arrival, KVTransport
from engine.config import EngineConfig
from engine.kv_blocks import (
    KVBlocks,
    KVLostError,
    KVPayload,
    PayloadOfSeveral,
    PendingBlocks,
    RemotePayload,
    Run,
    checksum,
    joined,
    overlap,
)

MIB = 1 << 20
MAX_OBJECT_BYTES = 64 * MIB


class ObjectStoreTransport(KVTransport):
    def __init__(self, *, checksums: bool, min_bytes: int, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self._checksums = checksums

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(checksums=config.kv_transfer_checksums, min_bytes=int(config.kv_transfer_object_mib * MIB))

    # -- at prefill

    def pack(self, start: int, blocks: PendingBlocks) -> list[KVPiece]:
        if isinstance(blocks, GangBlocks):
            held = blocks.held()
            largest = max(kv.bytes_per_token for kv in held)
            return [self._held_piece(start, held, first, end) for first, end in self._cuts(held[0].num_tokens, largest)]
        shares = blocks.result()
        num_tokens = shares[0].num_tokens
        per_token = sum(share.data.nbytes for share in shares) // num_tokens
        return [self._piece(start, shares, first, end) for first, end in self._cuts(num_tokens, per_token)]

    def _cuts(self, num_tokens: int, bytes_per_token: int) -> list[tuple[int, int]]:
        step = max(1, min(num_tokens, self.max_bytes // max(1, bytes_per_token)))
        return [(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]

    def _piece(self, start: int, shares: Sequence[KVBlocks], first: int, end: int) -> KVPiece:
        cut = joined([Run(shares=shares, first=first, end=end)])
        check = checksum(cut) if self._checksums else None
        return KVPiece(start=start + first, end=start + end, sections={MAIN: cut}, checksum=check)

    def _held_piece(self, start: int, held: Sequence[HeldKV], first: int, end: int) -> KVPiece:
        tokens = tuple(HeldTokens(kv=kv, first=first, end=end) for kv in held)
        return KVPiece(start=start + first, end=start + end, sections={}, held=tokens)

    # -- at decode

    def unpack(self, chunk: KVChunk, source: object) -> Sequence[Arrival]:
        for piece in chunk.pieces:
            _check(piece)
        first, last = chunk.pieces[0], chunk.pieces[-1]
        if first.held:
            payload = HeldPayload(chunk.pieces, checksums=self._checksums)
            return [Arrival(start=first.start, end=last.end, payload=payload)]
        return [
            Arrival(start=piece.start, end=piece.end, payload=ObjectPayload(source, index, piece))
            for index, piece in enumerate(chunk.pieces)
        ]


class ObjectPayload(RemotePayload):
    """KV in an object that this process has in view. Sent to another one, only the reference travels.

    Hosts of a gang fetch all of it, each for itself: it can't be cut without a call more for each host and object,
    which costs more than bytes between hosts do.
    """

    def __init__(self, source: object, index: int, piece: KVPiece | None = None) -> None:
        self._source = source
        self._index = index
        self._piece = piece

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPayload, (self._source, self._index)

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        if self._piece is None:
            assert isinstance(self._source, ray.ObjectRef)
            self._piece = fetched(self._source, timeout_s).pieces[self._index]
        piece, shares = self._piece, self._piece.sections[MAIN]
        if piece.checksum is not None and piece.checksum != checksum(shares):
            raise KVLostError(f"KV of tokens {piece.start} to {piece.end} was damaged on its way: wrong checksum")
        return shares


class HeldPayload(RemotePayload):
    """KV of consecutive pieces that hosts of the prefill replica have. They are asked when it is known for which heads;
    for the same ones once, however many hosts of this replica need them."""

    def __init__(self, pieces: Sequence[KVPiece], *, checksums: bool) -> None:
        self._pieces = pieces
        self._checksums = checksums
        self._asked: dict[tuple[int, range], KVPayload] = {}  # by the prefill host's rank

    def part(self, heads: range) -> KVPayload:
        payloads = []
        for number, kv in enumerate(tokens.kv for tokens in self._pieces[0].held):
            common = overlap(range(kv.heads[0].start, kv.heads[-1].stop), heads)
            if common:
                key = kv.rank, common
                if key not in self._asked:
                    self._asked[key] = self._ask(number, common)
                payloads.append(self._asked[key])
        return PayloadOfSeveral(payloads=payloads)

    def _ask(self, number: int, heads: range) -> KVPayload:
        held = [piece.held[number] for piece in self._pieces]
        slices = [KVSlice(key=tokens.kv.key, first=tokens.first, end=tokens.end) for tokens in held]
        return held[0].kv.host.ask(slices, heads, checksum=self._checksums)

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        return self.part(range(self._pieces[0].held[0].kv.format.num_kv_heads)).fetch(timeout_s)


def _check(piece: KVPiece) -> None:
    """Raises KVLostError if this is not what this side understands."""
    if piece.held and not piece.sections:
        return
    if piece.sections.keys() != {MAIN}:
        raise KVLostError(f"prefill sends {', '.join(piece.sections)}, of which this side knows {MAIN} only")
    if any(share.num_tokens != piece.end - piece.start for share in piece.sections[MAIN]):
        raise KVLostError(f"KV of tokens {piece.start} to {piece.end} has another number of tokens")
