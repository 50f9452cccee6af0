"""KV of the mock device in the form that engines exchange: 64 bits a token, the low word as key, the high one as value.

So it has one layer and one head of one element, and can be re-cut by tokens as a model's KV can.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.kv_blocks import KVBlocks, KVFormat, KVLostError, KVPayload, PendingBlocks

FORMAT = KVFormat(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class MockBlocks(PendingBlocks):
    """KV entries as they were when the read was dispatched, given out when the simulated device is there.

    Args:
        done_at: monotonic time.
    """

    def __init__(self, entries: NDArray[np.uint64], done_at: float) -> None:
        words = np.stack([entries.astype(np.uint32), (entries >> np.uint64(32)).astype(np.uint32)])
        self._blocks = KVBlocks(format=FORMAT, heads=range(1), data=words.reshape(1, 2, 1, -1, 1))
        self._done_at = done_at

    def result(self) -> Sequence[KVBlocks]:
        wait_s = self._done_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return (self._blocks,)


def entries_of(payload: KVPayload) -> NDArray[np.uint64]:
    """The KV entries of a payload.

    Raises:
        KVLostError: it is lost, or another model's.
    """
    shares = payload.shares()
    if len(shares) != 1 or shares[0].format != FORMAT:
        raise KVLostError("KV of another model arrived at the mock backend")
    keys, values = shares[0].data.reshape(2, -1).astype(np.uint64)
    entries: NDArray[np.uint64] = keys | values << np.uint64(32)
    return entries
