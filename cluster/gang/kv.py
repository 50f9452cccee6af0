"""KV of a gang: each host reads and writes its own share. The leader knows where it is, and need not have it.

`GangBlocks` is KV that the hosts have read out. It stays with them: whoever wants it, in any process of the cluster,
asks each host for the tokens and heads it needs (`KVHost.ask`). `GangPayload` is KV that has come to the hosts.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.kv_blocks import KVBlocks, KVFormat, KVLostError, KVPayload, PendingBlocks, checksum

NOT_KEPT = "the prefill replica does not keep this KV any more"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSlice:
    """Tokens first .. end - 1 of what was read under a key."""

    key: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenKV:
    """One object of the object store: what a host was asked for."""

    shares: tuple[KVBlocks, ...]
    checksum: int | None  # CRC-32 of all data, where asked for

    @classmethod
    def of(cls, shares: tuple[KVBlocks, ...], *, with_checksum: bool) -> GivenKV:
        return cls(shares=shares, checksum=checksum(shares) if with_checksum else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOut:
    """What a host has read under a key."""

    format: KVFormat
    heads: tuple[range, ...]  # of its shares
    num_tokens: int


class KVHost(ABC):
    """A host that has KV, as other processes reach it."""

    @abstractmethod
    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:
        """Asks for tokens, one slice behind the other, of those heads that the host has; does not wait.

        What comes belongs to the process that asks, so it outlives the host.

        Args:
            checksum: of what is sent, for the receiver to compare.
        """


@dataclass(frozen=True, kw_only=True)
class HeldKV:
    """KV that one host has, under a key."""

    host: KVHost | None  # None: the only host of the replica that says so
    rank: int
    key: int
    format: KVFormat
    heads: tuple[range, ...]
    num_tokens: int
    keeper: object = field(default=None, repr=False, compare=False)
    """While the leader has this, the host keeps the KV. Does not travel."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keeper": None}

    @property
    def bytes_per_token(self) -> int:
        return sum(map(len, self.heads)) * self.format.bytes_per_token // self.format.num_kv_heads


class KVOfHosts(ABC):
    """KV that all hosts read under one key, from the leader's side. Methods wait.

    Raises:
        BackendError: a host has not read it, or not in time; one line.
    """

    @abstractmethod
    def read_out(self, key: int, timeout_s: float) -> Sequence[tuple[KVHost, ReadOut]]:
        """Each host, and what it has read, once it has."""

    @abstractmethod
    def collect(self, key: int, timeout_s: float) -> Sequence[Sequence[KVBlocks]]:
        """What each host has read."""


class GangBlocks(PendingBlocks):
    """
    Args:
        release: called when nobody here needs the KV any more; on any thread, at any time.
    """

    def __init__(self, hosts: KVOfHosts, key: int, timeout_s: float, release: Callable[[], None]) -> None:
        self._hosts = hosts
        self._key = key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._shares: Sequence[KVBlocks] | None = None
        weakref.finalize(self, release)

    def held(self) -> list[HeldKV]:
        """Where which heads are, each once, when all hosts have read them out. Any thread; waits.

        Raises:
            BackendError: a host has not, or not in time.
        """
        found, seen = [], set[range]()
        for rank, (host, read) in enumerate(self._hosts.read_out(self._key, self._timeout_s)):
            heads = tuple(each for each in read.heads if each not in seen)
            seen.update(heads)
            if heads:
                found.append(
                    HeldKV(
                        host=host,
                        rank=rank,
                        key=self._key,
                        format=read.format,
                        heads=heads,
                        num_tokens=read.num_tokens,
                        keeper=self,
                    )
                )
        return found

    def result(self) -> Sequence[KVBlocks]:
        """The KV of all hosts, brought here."""
        with self._lock:
            if self._shares is None:
                shares: dict[range, KVBlocks] = {}
                for host in self._hosts.collect(self._key, self._timeout_s):
                    for share in host:
                        shares.setdefault(share.heads, share)
                self._shares = list(shares.values())
            return self._shares


class GangPayload(KVPayload):
    """KV that is with the hosts, under a key.

    Args:
        release: called if it has not been written when nobody here needs it any more; on any thread, at any time.
    """

    def __init__(self, key: int, release: Callable[[], None]) -> None:
        self.key = key
        self._finalizer = weakref.finalize(self, release)

    def shares(self) -> Sequence[KVBlocks]:
        raise KVLostError("this KV is with the hosts of a gang, not with their leader")

    def written(self) -> None:
        """The hosts have been told to write it, after which they don't keep it."""
        self._finalizer.detach()
