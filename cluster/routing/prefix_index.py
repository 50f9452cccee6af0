"""PrefixIndex: which replicas have which KV blocks, by short block hash.

A replica is a bit, and a block an integer of such bits, so that the replicas that hold a whole prefix are found with
one AND per block, however many there are. Knowledge is of two kinds: what engines report, and what is assumed, as a
request that computes it is on its way. An assumption is forgotten when it is not confirmed in time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable

from cluster.routing.chain import PrefixChain

_SWEEP_AT = 16
"""Bits of replicas that are gone, at least, before they are wiped from all blocks."""


class PrefixMatch:
    """How many blocks of a prompt each replica has. `holders[i]`: the bits of those that have blocks 0 .. i."""

    __slots__ = ("holders",)

    def __init__(self, holders: list[int]) -> None:
        self.holders = holders

    def num_blocks(self, bit: int) -> int:
        """Blocks of the prompt's prefix at one replica."""
        holders = self.holders
        if not holders or not holders[0] & bit:
            return 0
        if holders[-1] & bit:
            return len(holders)
        return bisect_left(holders, True, key=lambda mask: not mask & bit)


class PrefixIndex:
    def __init__(self, max_assumed_blocks: int) -> None:
        """`max_assumed_blocks` is per replica; beyond it, what was assumed first is forgotten first."""
        self._max_assumed = max_assumed_blocks
        self._holders: dict[bytes, int] = {}
        self._assumed: dict[int, OrderedDict[bytes, float]] = {}  # by bit: short hash -> until when
        self._gone = 0
        self._free_bits: list[int] = []
        self._num_bits = 0

    def __len__(self) -> int:
        return len(self._holders)

    def join(self) -> int:
        """The bit of a new replica, which has no blocks yet."""
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        bit = self._free_bits.pop()
        self._assumed[bit] = OrderedDict()
        return bit

    def leave(self, bit: int) -> None:
        """Forgets a replica. Its bit is wiped from the blocks together with those of others."""
        del self._assumed[bit]
        self._gone |= bit
        if self._gone.bit_count() >= max(_SWEEP_AT, len(self._assumed)):
            self._sweep()

    def add(self, bit: int, hashes: Iterable[bytes]) -> None:
        """A replica reports blocks that it has."""
        holders, assumed = self._holders, self._assumed[bit]
        for short in hashes:
            holders[short] = holders.get(short, 0) | bit
            assumed.pop(short, None)

    def discard(self, bit: int, hashes: Iterable[bytes]) -> None:
        """A replica reports blocks that it has no longer."""
        assumed = self._assumed[bit]
        for short in hashes:
            self._clear(bit, short)
            assumed.pop(short, None)

    def assume(self, bit: int, hashes: Iterable[bytes], *, now: float, until: float) -> None:
        """A replica will soon have these blocks; what it does not report by then (same clock), it has not."""
        holders, assumed = self._holders, self._assumed[bit]
        for short in hashes:
            known = holders.get(short, 0)
            if not known & bit:
                holders[short] = known | bit
            elif short not in assumed:
                continue  # reported
            assumed[short] = until
            assumed.move_to_end(short)
        while assumed and (len(assumed) > self._max_assumed or next(iter(assumed.values())) < now):
            self._clear(bit, assumed.popitem(last=False)[0])

    def match(self, chain: PrefixChain) -> PrefixMatch:
        """Who has how much of a prompt. Hashes one block more than the replica that has most."""
        mask = ~self._gone
        holders: list[int] = []
        for index in range(chain.num_blocks if self._holders else 0):
            mask &= self._holders.get(chain[index], 0)
            if not mask:
                break
            holders.append(mask)
        return PrefixMatch(holders)

    def _clear(self, bit: int, short: bytes) -> None:
        left = self._holders.get(short, 0) & ~bit
        if left:
            self._holders[short] = left
        else:
            self._holders.pop(short, None)

    def _sweep(self) -> None:
        kept = ((short, mask & ~self._gone) for short, mask in self._holders.items())
        self._holders = {short: mask for short, mask in kept if mask}
        self._free_bits += [1 << i for i in range(self._num_bits) if self._gone >> i & 1]
        self._gone = 0
