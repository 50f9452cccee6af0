"""Shares of KV on the host: joined into what a chip writes, and cut out of what the chips have read."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from engine.backend import BackendError
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVFormat, PendingBlocks, overlap

Array = NDArray[Any]

_ALIGNMENT = 64


def joined(shares: Sequence[KVBlocks], cut: slice, at: int, heads: range, shape: tuple[int, ...], filled: int) -> Array:
    """One chip's part of a batch: from token `at` on, these tokens of its heads; zeros behind them up to `filled`.

    Everything else may be anything. A share that is just what the chip takes is not copied.
    """
    for share in shares:
        whole = share.data[:, :, heads.start - share.heads.start :][:, :, : len(heads), cut]
        if heads.start >= share.heads.start and whole.shape == shape and whole.flags.c_contiguous:
            return whole
    data = _aligned(shape, shares[0].data.dtype)
    tokens = slice(at, at + cut.stop - cut.start)
    data[:, :, :, tokens.stop : filled] = 0
    data[:, :, len(heads) :, :filled] = 0
    for share in shares:
        common = overlap(heads, share.heads)
        if common:
            here = slice(common.start - heads.start, common.stop - heads.start)
            there = slice(common.start - share.heads.start, common.stop - share.heads.start)
            data[:, :, here, tokens] = share.data[:, :, there, cut]
    return data


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array that JAX's CPU devices take without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A batch that was read, and which of its tokens were asked for."""

    data: jax.Array
    tokens: slice


class ReadBlocks(PendingBlocks):
    """
    Args:
        chips: this host's chips whose heads make up its share, and those heads.
    """

    def __init__(self, parts: Sequence[ReadPart], chips: Mapping[jax.Device, range], kv_format: KVFormat) -> None:
        self._parts = list(parts)
        self._chips = chips
        self._format = kv_format
        self._lock = threading.Lock()
        self._shares: list[KVBlocks] = []

    def result(self) -> Sequence[KVBlocks]:
        with self._lock:
            if self._parts:
                try:
                    self._shares = [self._share(chip, heads) for chip, heads in self._chips.items()]
                except jax.errors.JaxRuntimeError as error:
                    raise BackendError(f"KV could not be read from the device: {first_line(error)}") from error
                self._parts.clear()
            return self._shares

    def _share(self, chip: jax.Device, heads: range) -> KVBlocks:
        pieces = []
        for part in self._parts:
            (local,) = (shard.data for shard in part.data.addressable_shards if shard.device == chip)
            pieces.append(np.asarray(local)[:, :, : len(heads), part.tokens])
        data = np.concatenate(pieces, axis=3) if len(pieces) > 1 else np.ascontiguousarray(pieces[0])
        return KVBlocks(format=self._format, heads=heads, data=data)
