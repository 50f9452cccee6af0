"""KVTransport: how KV gets from a prefill replica's process into a decode replica's.

`pack` runs at prefill and makes what a call of `fetch_kv` answers; `unpack` runs at decode on that answer. The object
store carries the data in the answer itself. A transport that moves data by other means (JAX's transfer server, RDT)
puts an address there, and fetches in `unpack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cluster.kv_transfer.messages import KVChunk, KVPiece
from engine.kv_blocks import KVBlocks, KVPayload


class KVTransport(ABC):
    """Methods may take long and run on worker threads.

    Attributes:
        min_bytes: smaller pieces are gathered, as every object costs a call.
        max_bytes: larger ones are cut, so that transfer begins early and no allocation is huge.
    """

    min_bytes: int
    max_bytes: int

    @abstractmethod
    def pack(self, start: int, shares: Sequence[KVBlocks]) -> list[KVPiece]:
        """Makes pieces of at most `max_bytes` of the KV of consecutive tokens from `start` on."""

    @abstractmethod
    def unpack(self, chunk: KVChunk, source: object) -> list[KVPayload]:
        """The KV of each piece of a chunk that has arrived.

        Args:
            source: what other hosts of this replica get the chunk by, for themselves.

        Raises:
            KVLostError: it is not what was sent, or not what this side understands.
        """
