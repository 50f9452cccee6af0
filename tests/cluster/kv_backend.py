"""A backend that computes nothing and keeps KV in an array: one host's heads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.mock import MockBackend
from engine.backend import Backend, BackendInfo, PendingStep, Progress, no_progress
from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVFormat, KVPayload, PendingBlocks, Run, joined

BLOCK_SIZE = 4
NUM_BLOCKS = 64


class KVBackend(Backend):
    """
    Args:
        heads: of the format, in shares as those of chips; None: all in one.
    """

    def __init__(self, kv_format: KVFormat, heads: Sequence[range] | None = None) -> None:
        self._format = kv_format
        self._heads = (range(kv_format.num_kv_heads),) if heads is None else heads
        shape = (kv_format.num_layers, 2, kv_format.num_kv_heads, NUM_BLOCKS * BLOCK_SIZE, kv_format.head_dim)
        self.cache = np.zeros(shape, np.uint16)

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        config = EngineConfig.from_args({"backend": "mock"})
        return MockBackend(config).load(progress)

    def warmup(self, progress: Progress = no_progress) -> None: ...

    def dispatch(self, batch: StepBatch) -> PendingStep:
        raise NotImplementedError

    def kv_format(self) -> KVFormat:
        return self._format

    def kv_heads(self) -> range:
        return range(self._heads[0].start, self._heads[-1].stop) if self._heads else range(0)

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:
        places = self._places(block_ids, offset, num_tokens)
        return Ready(
            [
                KVBlocks(format=self._format, heads=heads, data=self.cache[:, :, heads.start : heads.stop, places])
                for heads in self._heads
            ]
        )

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        shares = payload.shares()
        places = self._places(block_ids, offset, shares[0].num_tokens)
        for share in joined([Run(shares=shares, first=0, end=len(places))], self.kv_heads()):
            for head in share.heads:
                self.cache[:, :, head, places] = share.data[:, :, head - share.heads.start]

    def _places(self, block_ids: Sequence[int], offset: int, num_tokens: int) -> list[int]:
        tokens = [block * BLOCK_SIZE + index for block in block_ids for index in range(BLOCK_SIZE)]
        return tokens[offset : offset + num_tokens]

    def close(self) -> None: ...


class Ready(PendingBlocks):
    """What a device has read out."""

    def __init__(self, shares: Sequence[KVBlocks]) -> None:
        self._shares = [replace(share, data=np.ascontiguousarray(share.data)) for share in shares]

    def result(self) -> Sequence[KVBlocks]:
        return self._shares
