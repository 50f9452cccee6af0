"""PrefixStoreConnector: a replica's engine and the cluster's prefix store.

What enters: every full prompt block that is computed, while the writer has room (write-through, so that what replica A
has just computed is there for replica B), and blocks that are evicted, which also brings answers (a conversation's next
prompt) and what was dropped before. When half of the room is taken, only blocks that several prompts have had enter.
What the store does not keep, its own LRU decides.

What is read: a prompt's blocks behind those that are here, if the store has enough of them without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.prefix_store.chains import RecentChains
from cluster.prefix_store.client import StoreClient
from cluster.prefix_store.follower import Follower
from cluster.prefix_store.identity import space_of
from cluster.prefix_store.metrics import StoreMetrics
from cluster.prefix_store.reader import Reader
from cluster.prefix_store.writer import Writer
from engine.backend import Backend
from engine.config import EngineConfig
from engine.kv_blocks import PendingBlocks
from engine.kv_connector import KVConnector, KVDemand, KVEvent
from engine.metrics import MetricsSnapshot


class PrefixStoreConnector(KVConnector):
    """Until the store has been found, and while there is none, nothing is read or written."""

    wants_computed = True

    def __init__(self, config: EngineConfig, backend: Backend, client: StoreClient) -> None:
        self._config = config
        self._backend = backend
        self._client = client
        self._metrics = StoreMetrics()
        self._chains = RecentChains()
        self._block_size = config.block_size
        self._min_blocks = -(-config.kv_store_min_tokens // config.block_size)
        self._follower = Follower(client, self._identify, self._metrics)

    def attach(self, wake: Callable[[], None]) -> None:
        bytes_per_block = self._backend.kv_format().bytes_per_token * self._block_size
        size = {"block_size": self._block_size, "bytes_per_block": bytes_per_block}
        self._reader = Reader(self._client, self._backend.receive_blocks, self._metrics, wake, **size)
        self._writer = Writer(self._client, self._follower, self._chains, self._metrics, **size)
        self._follower.start()

    def _identify(self) -> bytes:
        return space_of(self._config, self._backend.kv_format())

    def fetch(self, demand: KVDemand) -> int | None:
        self._chains.note(demand.block_hashes)
        space = self._follower.space
        if space is None:
            return None
        first = demand.num_cached_tokens // self._block_size
        last = (len(demand.token_ids) - 1) // self._block_size  # one token is left to compute, for its logits
        count = self._follower.num_known(demand.block_hashes, first, last)
        if count < max(1, self._min_blocks):
            return None
        wanted = demand.block_hashes[first : first + count]
        start = first * self._block_size
        if not self._reader.begin(space, demand.request.request_id, start, wanted):
            return None
        return start + count * self._block_size

    def cancel(self, request_id: str) -> None:
        self._reader.cancel(request_id)

    def events(self) -> Sequence[KVEvent]:
        return self._reader.events()

    def keeps(self, block_hash: bytes) -> bool:
        return self._writer.wants(block_hash)

    def evicted(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        self._writer.put(block_hashes, blocks, reverse=True)

    def computed(self, block_hashes: Sequence[bytes], blocks: PendingBlocks) -> None:
        self._writer.put(block_hashes, blocks, reverse=False)

    def metrics(self) -> MetricsSnapshot:
        return self._metrics.snapshot()

    def close(self) -> None:
        self._follower.close()
        self._writer.close()
        self._reader.close()
        self._client.close()
