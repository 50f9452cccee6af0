"""Writer: KV that an engine has computed or is about to overwrite, into the store, by one thread in the background.

What waits is bounded in bytes; what would exceed that is dropped, which costs another replica a computation and nobody
a delay. Blocks that come shortly after one another are written as one object.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.prefix_store.chains import RecentChains
from cluster.prefix_store.client import NewSegment, StoreClient, StoreError
from cluster.prefix_store.follower import Follower
from cluster.prefix_store.metrics import StoreMetrics
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, PendingBlocks, Run, joined

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 20
SEGMENT_BYTES = 16 << 20
LINGER_S = 0.05
ADD_TIMEOUT_S = 30.0
IDLE_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    block_hashes: Sequence[bytes]
    blocks: PendingBlocks
    reverse: bool  # a chain's last block comes first


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    block_hash: bytes
    shares: Sequence[KVBlocks]  # that hold it, beside others
    index: int  # block within them


class Writer:
    """`wants` and `put` are called by the engine's thread and return at once."""

    def __init__(
        self,
        client: StoreClient,
        follower: Follower,
        chains: RecentChains,
        metrics: StoreMetrics,
        *,
        block_size: int,
        bytes_per_block: int,
    ) -> None:
        self._client = client
        self._follower = follower
        self._chains = chains
        self._metrics = metrics
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0  # in the queue, being written, or promised by `wants`
        self._on_way: set[bytes] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefix-store-writer", daemon=True)
        self._thread.start()

    def wants(self, block_hash: bytes) -> bool:
        """Whether to read a block out and `put` it. Under pressure, only blocks that several prompts had."""
        if self._follower.space is None or self._follower.knows(block_hash) or block_hash in self._on_way:
            return False
        room = MAX_WAITING_BYTES if self._chains.is_popular(block_hash) else MAX_WAITING_BYTES // 2
        with self._lock:
            if self._waiting_bytes + self._bytes_per_block > room:
                self._metrics.add(write_blocks_dropped=1)
                return False
            self._waiting_bytes += self._bytes_per_block
            self._on_way.add(block_hash)
        return True

    def put(self, block_hashes: Sequence[bytes], blocks: PendingBlocks, *, reverse: bool) -> None:
        """Takes blocks that were wanted."""
        self._queue.put(_Item(block_hashes=block_hashes, blocks=blocks, reverse=reverse))

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    # -- the writer's thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                first = self._queue.get(timeout=IDLE_WAIT_S)
            except queue.Empty:
                continue
            if first is not None:
                self._write_all([first, *self._followers(first)])

    def _followers(self, first: _Item) -> Iterator[_Item]:
        """What comes shortly after, while it fits the same object."""
        room = SEGMENT_BYTES // self._bytes_per_block - len(first.block_hashes)
        until = time.monotonic() + LINGER_S
        while room > 0:
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if item is None:
                return
            room -= len(item.block_hashes)
            yield item

    def _write_all(self, items: Sequence[_Item]) -> None:
        try:
            blocks = [block for item in items for block in self._read(item)]
            began = time.monotonic()
            size = max(1, SEGMENT_BYTES // self._bytes_per_block)
            for start in range(0, len(blocks), size):
                self._write(blocks[start : start + size])
            self._metrics.add(write_seconds=time.monotonic() - began)
        except Exception:  # the next ones may do better
            logger.exception("writing to the prefix store failed")
            self._metrics.add(write_blocks_dropped=sum(len(item.block_hashes) for item in items))
        finally:
            with self._lock:
                for item in items:
                    self._waiting_bytes -= len(item.block_hashes) * self._bytes_per_block
                    self._on_way.difference_update(item.block_hashes)

    def _read(self, item: _Item) -> list[_Block]:
        """An item's blocks, as the device gives them."""
        try:
            shares = item.blocks.result()
        except Exception as error:
            self._dropped(len(item.block_hashes), error)
            return []
        blocks = [_Block(block_hash=h, shares=shares, index=i) for i, h in enumerate(item.block_hashes)]
        return blocks[::-1] if item.reverse else blocks

    def _write(self, blocks: Sequence[_Block]) -> None:
        space = self._follower.space
        hashes = [block.block_hash for block in blocks]
        if space is None or self._closed.is_set():
            self._metrics.add(write_blocks_dropped=len(hashes))
            return
        parent, shares = self._chains.parent(hashes[0]), gather(blocks, self._block_size)
        segment = NewSegment(space=space, block_hashes=hashes, parent=parent, shares=shares)
        try:
            added = self._client.add(segment, ADD_TIMEOUT_S)
        except StoreError as error:
            self._dropped(len(hashes), error)
            return
        if added:
            self._follower.learn(hashes)
            self._metrics.add(written_bytes=segment.num_bytes)

    def _dropped(self, count: int, error: Exception) -> None:
        self._metrics.add(write_blocks_dropped=count)
        logger.debug("%d blocks are not stored: %s", count, first_line(error))


def gather(blocks: Sequence[_Block], block_size: int) -> Sequence[KVBlocks]:
    """The blocks one behind the other, in shares with contiguous data."""
    runs: list[Run] = []
    for block in blocks:
        first, end = block.index * block_size, (block.index + 1) * block_size
        if runs and runs[-1].shares is block.shares and runs[-1].end == first:
            runs[-1] = replace(runs[-1], end=end)
        else:
            runs.append(Run(shares=block.shares, first=first, end=end))
    return joined(runs)
