"""ObjectStoreTransport: KV as results of Ray calls, in contiguous integer arrays.

Ray writes such arrays to shared memory in one copy and hands out views of it without any. As results of calls that the
decode side made, the objects belong to it: they outlive the prefill replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import RayError

from cluster.kv_transfer.messages import MAIN, KVChunk, KVPiece
from cluster.kv_transfer.transport import KVTransport
from engine.config import EngineConfig
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload, LocalPayload

MIB = 1 << 20
MAX_OBJECT_BYTES = 64 * MIB
GET_TIMEOUT_S = 10.0
"""Longest that another host waits for an object, which may have to come from another node."""


class ObjectStoreTransport(KVTransport):
    def __init__(self, *, checksums: bool, min_bytes: int, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self._checksums = checksums

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(checksums=config.kv_transfer_checksums, min_bytes=int(config.kv_transfer_object_mib * MIB))

    def pack(self, start: int, shares: Sequence[KVBlocks]) -> list[KVPiece]:
        num_tokens = shares[0].num_tokens
        per_token = max(1, sum(share.data.nbytes for share in shares) // num_tokens)
        step = max(1, min(num_tokens, self.max_bytes // per_token))
        return [
            self._piece(start + first, [_cut(share, first, first + step) for share in shares])
            for first in range(0, num_tokens, step)
        ]

    def _piece(self, start: int, shares: Sequence[KVBlocks]) -> KVPiece:
        return KVPiece(
            start=start,
            end=start + shares[0].num_tokens,
            sections={MAIN: tuple(shares)},
            checksum=checksum(shares) if self._checksums else None,
        )

    def unpack(self, chunk: KVChunk, source: object) -> list[KVPayload]:
        for piece in chunk.pieces:
            _check(piece)
        if source is None:
            return [LocalPayload(blocks=piece.sections[MAIN]) for piece in chunk.pieces]
        assert isinstance(source, ray.ObjectRef)
        return [ObjectPayload(source, index, piece) for index, piece in enumerate(chunk.pieces)]


class ObjectPayload(KVPayload):
    """KV in an object that this process has in view. Sent to another one, only the reference travels."""

    def __init__(self, source: ray.ObjectRef[KVChunk], index: int, piece: KVPiece | None = None) -> None:
        self._source = source
        self._index = index
        self._piece = piece

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPayload, (self._source, self._index)

    def shares(self) -> Sequence[KVBlocks]:
        if self._piece is None:
            try:
                self._piece = ray.get(self._source, timeout=GET_TIMEOUT_S).pieces[self._index]
            except RayError as error:
                raise KVLostError(f"an object with KV is lost: {first_line(error)}") from error
        return self._piece.sections[MAIN]


def _check(piece: KVPiece) -> None:
    """Raises KVLostError if this is not what was sent, or not what this side understands."""
    if piece.sections.keys() != {MAIN}:
        raise KVLostError(f"prefill sends {', '.join(piece.sections)}, of which this side knows {MAIN} only")
    shares = piece.sections[MAIN]
    if any(share.num_tokens != piece.end - piece.start for share in shares):
        raise KVLostError(f"KV of tokens {piece.start} to {piece.end} has another number of tokens")
    if piece.checksum is not None and piece.checksum != checksum(shares):
        raise KVLostError(f"KV of tokens {piece.start} to {piece.end} was damaged on its way: wrong checksum")


def checksum(shares: Sequence[KVBlocks]) -> int:
    """CRC-32 of all data."""
    value = 0
    for share in shares:
        value = zlib.crc32(np.ascontiguousarray(share.data).data.cast("B"), value)
    return value


def _cut(share: KVBlocks, first: int, end: int) -> KVBlocks:
    """Tokens first .. end - 1, contiguous. A copy, unless that is all of them."""
    data = np.ascontiguousarray(share.data[:, :, :, first:end])
    return KVBlocks(format=share.format, heads=share.heads, data=data)
