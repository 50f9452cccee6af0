"""KVTransport: how KV gets from a prefill replica's hosts into a decode replica's.

`pack` runs at prefill and makes what a call of `fetch_kv` answers; `unpack` runs at decode on that answer. The object
store carries one host's data in the answer itself; of a gang, the answer says which hosts have it. A transport that
moves data by other means (JAX's transfer server, RDT) puts an address there, too, and fetches with the payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv_transfer.messages import KVChunk, KVPiece
from engine.kv_blocks import KVPayload, PendingBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """KV of tokens start .. end - 1, for `Backend.receive_blocks`."""

    start: int
    end: int
    payload: KVPayload


class KVTransport(ABC):
    """Methods may take long and run on worker threads.

    Attributes:
        min_bytes: smaller pieces are gathered, as every object costs a call.
        max_bytes: larger ones are cut, so that transfer begins early and no allocation is huge.
    """

    min_bytes: int
    max_bytes: int

    @abstractmethod
    def pack(self, start: int, blocks: PendingBlocks) -> list[KVPiece]:
        """Makes pieces of at most `max_bytes` of the KV of consecutive tokens from `start` on, when it is read out.

        Raises:
            BackendError: it can't be read.
        """

    @abstractmethod
    def describe(self, index: int, chunk: KVChunk) -> KVChunk:
        """What a decode replica on several hosts is told of chunk `index`: where the data is, instead of the data."""

    @abstractmethod
    def give(self, chunk: KVChunk, heads: range) -> object:
        """Some heads of the data of a chunk that was described."""

    @abstractmethod
    def unpack(self, chunk: KVChunk, source: object) -> Sequence[Arrival]:
        """The KV of a chunk, which may still have to be fetched.

        Args:
            source: the object that the chunk is; the host to ask if it is described.

        Raises:
            KVLostError: it is not what this side understands.
        """
