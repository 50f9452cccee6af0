"""KV without content: a simulation keeps account of blocks and of what travels, and of nothing in them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_blocks import KVBlocks, KVPayload, PendingBlocks


class NoPayload(KVPayload):
    """KV on its way."""

    def shares(self) -> Sequence[KVBlocks]:
        return ()


class NoBlocks(PendingBlocks):
    """What is read from a cache, and the cache."""

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:  # noqa: ARG002
        return self

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        pass

    def result(self) -> Sequence[KVBlocks]:
        return ()
