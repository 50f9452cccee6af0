"""ObjectStoreTransport: KV as results of Ray calls, in contiguous integer arrays.

Ray writes such arrays to shared memory in one copy and hands out views of it without any. As results of calls that the
decode side made, the objects belong to it: they outlive the prefill replica.

From one host to one, the data is in the answer. A gang's leader does not have it, or has no use for it: the answer
says which hosts of the prefill replica have it, and the decode replica asks each of them for what each of its own
needs. So every byte goes from one host to one other, or to those that keep the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from cluster.gang.kv import GangBlocks, GivenKV, HeldKV, KVHost, KVSlice
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

    def describe(self, index: int, chunk: KVChunk) -> KVChunk:
        pieces = [piece if piece.held else _described(index, piece) for piece in chunk.pieces]
        return replace(chunk, pieces=tuple(pieces))

    def give(self, chunk: KVChunk, heads: range) -> GivenKV:
        runs = [Run(shares=piece.sections[MAIN], first=0, end=piece.end - piece.start) for piece in chunk.pieces]
        return GivenKV.of(joined(runs, heads), with_checksum=self._checksums)

    # -- at decode

    def unpack(self, chunk: KVChunk, source: object) -> Sequence[Arrival]:
        for piece in chunk.pieces:
            _check(piece)
        first, last = chunk.pieces[0], chunk.pieces[-1]
        if first.held:
            payload = HeldPayload(chunk.pieces, source, checksums=self._checksums)
            return [Arrival(start=first.start, end=last.end, payload=payload)]
        return [Arrival(start=piece.start, end=piece.end, payload=PiecePayload(piece)) for piece in chunk.pieces]


class PiecePayload(RemotePayload):
    """KV that came with the answer, and is in this process' view."""

    def __init__(self, piece: KVPiece) -> None:
        self._piece = piece

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:  # noqa: ARG002
        piece, shares = self._piece, self._piece.sections[MAIN]
        if piece.checksum is not None and piece.checksum != checksum(shares):
            raise KVLostError(f"KV of tokens {piece.start} to {piece.end} was damaged on its way: wrong checksum")
        return shares


class HeldPayload(RemotePayload):
    """KV of consecutive pieces that hosts of the prefill replica have. They are asked when it is known for which heads;
    for the same ones once, however many hosts of this replica need them."""

    def __init__(self, pieces: Sequence[KVPiece], replica: object, *, checksums: bool) -> None:
        """`replica` is the host, if it is the only one."""
        self._pieces = pieces
        self._replica = replica
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
        host = held[0].kv.host or self._replica
        assert isinstance(host, KVHost)
        return host.ask(slices, heads, checksum=self._checksums)

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        return self.part(range(self._pieces[0].held[0].kv.format.num_kv_heads)).fetch(timeout_s)


def _described(index: int, piece: KVPiece) -> KVPiece:
    shares, num_tokens = piece.sections[MAIN], piece.end - piece.start
    kv = HeldKV(
        host=None,
        rank=0,
        key=index,
        format=shares[0].format,
        heads=tuple(share.heads for share in shares),
        num_tokens=num_tokens,
    )
    held = (HeldTokens(kv=kv, first=0, end=num_tokens),)
    return replace(piece, sections={}, checksum=None, held=held)


def _check(piece: KVPiece) -> None:
    """Raises KVLostError if this is not what this side understands."""
    if piece.held and not piece.sections:
        return
    if piece.sections.keys() != {MAIN}:
        raise KVLostError(f"prefill sends {', '.join(piece.sections)}, of which this side knows {MAIN} only")
    if any(share.num_tokens != piece.end - piece.start for share in piece.sections[MAIN]):
        raise KVLostError(f"KV of tokens {piece.start} to {piece.end} has another number of tokens")
