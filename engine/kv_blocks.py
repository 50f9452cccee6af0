"""KVBlocks: keys and values of a run of tokens, in a layout that no device and no tensor-parallel size shows.

What leaves one engine's KV cache for another's, or for host memory, takes this form: unequal block sizes are re-cut by
tokens, unequal tensor-parallel sizes by head ranges, and another kind of hardware only has to know this.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class KVLostError(RuntimeError):
    """KV that was on its way here does not come. The message is one line."""


class KVLateError(KVLostError):
    """It has not come in time, and may exist still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVFormat:
    """What two engines must have in common to exchange KV: the model's, not the deployment's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "int8" | "float8_e4m3fn"

    @property
    def bytes_per_token(self) -> int:
        """Of all layers and heads, keys and values."""
        size = {"float32": 4, "bfloat16": 2}.get(self.dtype, 1)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBlocks:
    """One host's share of the KV of consecutive tokens.

    `data` is contiguous, in the integer type of the dtype's width (uint32, uint16, uint8): numpy's and Ray's zero-copy
    paths know no bfloat16.
    """

    format: KVFormat
    heads: range  # which of the model's key-value heads
    data: NDArray[Any]  # [layers, 2 (key, value), heads, tokens, head_dim]

    @property
    def num_tokens(self) -> int:
        return int(self.data.shape[3])


class PendingBlocks(ABC):
    """KV that a device was told to read out, and that may still be on its way to the host."""

    @abstractmethod
    def result(self) -> Sequence[KVBlocks]:
        """Waits for the device; any thread may call it, more than once. The shares together hold every head.

        Raises:
            BackendError: the read failed.
        """


class KVPayload(ABC):
    """KV on its way into a cache. `Backend.receive_blocks` brings it to the hosts that keep it, and gives the payload
    that `Backend.write_blocks` takes."""

    def part(self, heads: range) -> KVPayload:  # noqa: ARG002
        """What a host that keeps these heads needs of it, in a form that can be sent there; more where it can't be cut.

        Does not wait for the KV itself.
        """
        return self

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:  # noqa: ARG002
        """Waits until the KV is in this process' memory, and gives it.

        Raises:
            KVLostError: it is lost, damaged, or late (KVLateError).
        """
        return self.shares()

    @abstractmethod
    def shares(self) -> Sequence[KVBlocks]:
        """The KV, in shares that together hold every head that this host needs; at once, as it has arrived.

        Raises:
            KVLostError: it is not here.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPayload(KVPayload):
    """KV in this process' memory."""

    blocks: Sequence[KVBlocks]

    def shares(self) -> Sequence[KVBlocks]:
        return self.blocks


Receive = Callable[[Sequence[KVPayload], float], Sequence[KVPayload]]
"""Backend.receive_blocks."""


class RemotePayload(KVPayload):
    """KV that has to be fetched first."""

    def shares(self) -> Sequence[KVBlocks]:
        return self.fetch(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadOfSeveral(RemotePayload):
    """Shares of the same tokens that come from several places."""

    payloads: Sequence[KVPayload]

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:
        deadline = time.monotonic() + timeout_s
        return [share for each in self.payloads for share in each.fetch(max(0.0, deadline - time.monotonic()))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive tokens of one read."""

    shares: Sequence[KVBlocks]
    first: int
    end: int


def joined(runs: Sequence[Run], heads: range | None = None) -> tuple[KVBlocks, ...]:
    """Tokens of several reads, one behind the other: contiguous shares, which are copies only where they must be.

    Args:
        runs: whose shares have the same heads in the same order.
        heads: the others are left out; None: all are wanted.
    """
    found = []
    for index, share in enumerate(runs[0].shares):
        common = share.heads if heads is None else overlap(share.heads, heads)
        here = slice(common.start - share.heads.start, common.stop - share.heads.start)
        parts = [run.shares[index].data[:, :, here, run.first : run.end] for run in runs] if common else []
        if parts:
            data = np.concatenate(parts, axis=3) if len(parts) > 1 else np.ascontiguousarray(parts[0])
            found.append(replace(share, heads=common, data=data))
    return tuple(found)


def overlap(one: range, other: range) -> range:
    """What two ranges of heads have in common; an empty one is falsy."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def check_shares(shares: Sequence[KVBlocks], kept: KVFormat, heads: Sequence[int]) -> int:
    """Checks that shares hold these heads of this model; gives the number of tokens.

    Raises:
        KVLostError: they don't.
    """
    if any(share.format != kept for share in shares):
        raise KVLostError(f"KV of another model arrived, {shares[0].format} where {kept} is kept")
    lengths = {share.num_tokens for share in shares}
    missing = set(heads) - {head for share in shares for head in share.heads}
    if len(lengths) != 1 or missing:
        raise KVLostError(f"KV of unequal lengths {sorted(lengths)} or without heads {sorted(missing)} arrived")
    return lengths.pop()


def checksum(shares: Sequence[KVBlocks]) -> int:
    """CRC-32 of all data."""
    value = 0
    for share in shares:
        value = zlib.crc32(np.ascontiguousarray(share.data).data.cast("B"), value)
    return value
