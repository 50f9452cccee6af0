"""KV to store: small arrays whose content tells which block they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.prefix_store.client import NewSegment
from engine.kv_blocks import KVBlocks, KVFormat, PendingBlocks

FORMAT = KVFormat(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
SPACE = b"model"
BLOCK_SIZE = 8
BLOCK_BYTES = BLOCK_SIZE * FORMAT.bytes_per_token


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def hashes(*numbers: int) -> list[bytes]:
    return [hash_of(number) for number in numbers]


def shares_of(numbers: Sequence[int], num_shares: int = 1) -> list[KVBlocks]:
    """Blocks by number, in shares of equally many heads."""
    heads = FORMAT.num_kv_heads // num_shares
    tokens = np.repeat(np.array(numbers, np.uint16), BLOCK_SIZE) * 10
    shape = (FORMAT.num_layers, 2, heads, len(tokens), FORMAT.head_dim)
    return [
        KVBlocks(
            format=FORMAT,
            heads=range(share * heads, (share + 1) * heads),
            data=np.ascontiguousarray(np.broadcast_to(tokens[:, None] + np.uint16(share), shape)),
        )
        for share in range(num_shares)
    ]


def segment_of(*numbers: int, shares: Sequence[KVBlocks] | None = None) -> NewSegment:
    content = shares_of(numbers) if shares is None else shares
    return NewSegment(space=SPACE, block_hashes=hashes(*numbers), parent=None, shares=content)


def numbers_in(shares: Sequence[KVBlocks]) -> list[int]:
    """Which blocks shares hold; checks that all of each block is there, in every share."""
    found = []
    for index, share in enumerate(shares):
        values = share.data[:, :, :, ::BLOCK_SIZE]
        expected = np.repeat(values, BLOCK_SIZE, axis=3)
        assert np.array_equal(share.data, expected)
        assert share.data.flags.c_contiguous
        assert (values == values[:1, :1, :1, :, :1]).all()
        found.append(((values[0, 0, 0, :, 0] - index) // 10).tolist())
    assert all(numbers == found[0] for numbers in found)
    return list(found[0])


class ReadyBlocks(PendingBlocks):
    """What a device has read out."""

    def __init__(self, *numbers: int, num_shares: int = 1) -> None:
        self._shares = shares_of(numbers, num_shares)

    def result(self) -> Sequence[KVBlocks]:
        return self._shares
