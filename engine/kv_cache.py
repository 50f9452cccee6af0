"""Block accounting: which KV cache block belongs to whom, and which freed blocks can still be found by their content.

Pure Python; no device in it. The KV cache is a pool of fixed blocks of `block_size` tokens. A full block whose content
is computed is registered under a hash that chains all tokens before it, so that a later request with the same prefix
shares the block instead of computing it. Freed blocks stay findable until they are handed out again, least recently
used first and a chain's tail before its head (a head without tail is still useful, a tail without head is not).
Every operation costs O(1) per block; nothing happens per token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from engine.news import CacheJournal
from engine.request import EngineRequest

_DIGEST_BYTES = 32
_TOKEN = np.dtype("<i4")

HashedBlock = tuple[bytes, int]
"""The hash of a full block's content, and the block."""


def root_hash(*, cache_salt: str = "", adapter_digest: bytes = b"") -> bytes:
    """Parent of a sequence's first block. Requests with different roots never share a block.

    The adapter enters by the digest of its weights, never by its name, which may come to mean other weights.
    """
    salt = cache_salt.encode()
    return hashlib.blake2b(len(salt).to_bytes(8, "little") + salt + adapter_digest, digest_size=_DIGEST_BYTES).digest()


def request_root(request: EngineRequest) -> bytes:
    """The root of a request's blocks, for engines and routers alike: what tells it from others beside its tokens."""
    return root_hash(cache_salt=request.cache_salt)


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Hashes of consecutive full blocks, each computed when it is asked for, given the hash of the block before them.

    The same on every machine and in every process.
    """
    packed = np.array(token_ids, _TOKEN).tobytes()
    step = block_size * _TOKEN.itemsize
    for end in range(step, len(packed) + 1, step):
        parent = hashlib.blake2b(parent + packed[end - step : end], digest_size=_DIGEST_BYTES).digest()
        yield parent


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks - 1.

    A block is *owned* while its count is positive, otherwise *free*. Free blocks that are registered stay findable.
    Only registered blocks, which nobody writes any more, are ever shared; an unregistered block has one owner.

    Args:
        keeps: which findable blocks, by their hash, are of interest to somebody when they are handed out anew.
        journal: where it is written which blocks become findable and cease to be.
    """

    def __init__(
        self,
        num_blocks: int,
        keeps: Callable[[bytes], bool] | None = None,
        journal: CacheJournal | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._keeps = keeps
        self._journal = journal
        self._evicted: list[HashedBlock] = []
        self._owners = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of reuse

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, findable ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks; what was registered in them is forgotten.

        Raises:
            RuntimeError: fewer blocks are free (callers check `num_free` first).
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} KV blocks asked for, {len(self._free)} free")
        return [self._take_oldest() for _ in range(count)]

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        known_as = self._hash_of[block]
        if known_as is not None:
            del self._by_hash[known_as]
            self._hash_of[block] = None
            if self._journal is not None:
                self._journal.evicted(known_as)
            if self._keeps is not None and self._keeps(known_as):
                self._evicted.append((known_as, block))
        self._owners[block] = 1
        return block

    def take_evicted(self) -> list[HashedBlock]:
        """Blocks of interest that were handed out since the last call and are still to be overwritten."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest registered prefix of a hash chain. Takes nothing."""
        found = []
        for known_as in hashes:
            block = self._by_hash.get(known_as)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """How many blocks would be free if `blocks` were shared."""
        return len(self._free) - sum(not self._owners[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds an owner to registered blocks that `find` returned."""
        for block in blocks:
            if not self._owners[block]:
                del self._free[block]
            self._owners[block] += 1

    def register(self, block: int, known_as: bytes) -> bool:
        """Makes an owned, full, computed block findable; says whether it was news.

        The first block with a given content stays the one found.
        """
        if known_as in self._by_hash or self._hash_of[block] is not None:
            return False
        self._by_hash[known_as] = block
        self._hash_of[block] = known_as
        if self._journal is not None:
            self._journal.registered(known_as)
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Removes an owner from each block of a sequence, given from first to last.

        Raises:
            RuntimeError: a block has no owner (a double free).
        """
        for block in reversed(blocks):
            if not self._owners[block]:
                raise RuntimeError(f"KV block {block} freed twice")
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)  # nothing to find in it: reuse it first
