"""KV of the mock device in the form that engines exchange: 64 bits a token, the low word as key, the high one as value.

So it has one layer and one head of one element, and can be re-cut by tokens as a model's KV can. A wider head repeats
the element, for KV of a model's size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.kv_blocks import KVBlocks, KVFormat, KVLostError, KVPayload, PendingBlocks


def format_of(bytes_per_token: int) -> KVFormat:
    """The form of KV that takes so many bytes, a multiple of 8."""
    return KVFormat(num_layers=1, num_kv_heads=1, head_dim=bytes_per_token // 8, dtype="float32")


FORMAT = format_of(8)


class MockBlocks(PendingBlocks):
    """KV entries as they were when the read was dispatched, given out when the simulated device is there.

    Args:
        done_at: monotonic time.
    """

    def __init__(self, entries: NDArray[np.uint64], kv_format: KVFormat, done_at: float) -> None:
        self._words = np.stack([entries.astype(np.uint32), (entries >> np.uint64(32)).astype(np.uint32)])
        self._format = kv_format
        self._done_at = done_at
        self._shares: tuple[KVBlocks, ...] = ()

    def result(self) -> Sequence[KVBlocks]:
        wait_s = self._done_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        if not self._shares:
            data = np.repeat(self._words.reshape(1, 2, 1, -1, 1), self._format.head_dim, axis=-1)
            self._shares = (KVBlocks(format=self._format, heads=range(1), data=data),)
        return self._shares


def entries_of(payload: KVPayload, kv_format: KVFormat) -> NDArray[np.uint64]:
    """The KV entries of a payload.

    Raises:
        KVLostError: it is lost, or another model's.
    """
    shares = payload.shares()
    if len(shares) != 1 or shares[0].format != kv_format:
        raise KVLostError("KV of another model arrived at the mock backend")
    words = shares[0].data.reshape(2, -1, kv_format.head_dim)
    if not (words == words[..., :1]).all():
        raise KVLostError("damaged KV arrived at the mock backend")
    keys, values = words[..., 0].astype(np.uint64)
    entries: NDArray[np.uint64] = keys | values << np.uint64(32)
    return entries
