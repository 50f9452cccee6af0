"""KVExports: what leaves an engine's KV cache, and when it is read out.

Reads run on the device in the order of dispatch, as steps do. A chunk is read right after the step that computes it, a
block that is about to be overwritten right before the step that does it, so nothing has to be locked or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.batch_builder import Chunk
from engine.kv_blocks import PendingBlocks
from engine.kv_cache import HashedBlock
from engine.kv_connector import KVConnector, KVExport
from engine.metrics import EngineMetrics
from engine.running import RequestState


class BlockReader(Protocol):
    """The part of a Backend that is needed here."""

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks: ...


class KVExports:
    """Called by the engine's loop around each step."""

    def __init__(
        self, connector: KVConnector, backend: BlockReader, *, block_size: int, metrics: EngineMetrics
    ) -> None:
        self._connector = connector
        self._backend = backend
        self._block_size = block_size
        self._metrics = metrics

    def before_step(self, evicted: Sequence[HashedBlock]) -> None:
        """The next step, or KV that is written before it, overwrites these blocks."""
        if evicted:
            hashes, blocks = zip(*evicted, strict=True)
            pending = self._backend.read_blocks(blocks, len(blocks) * self._block_size)
            self._connector.evicted(hashes, pending)

    def after_dispatch(self, chunks: Sequence[Chunk]) -> None:
        """These chunks have just been dispatched."""
        for chunk in chunks:
            request = chunk.state.request
            if request.export_from is not None:
                known = len(request.prompt_token_ids) + len(request.output_token_ids)
                self._export(chunk.state, min(chunk.end, known))

    def after_collect(self, computed: Sequence[HashedBlock]) -> None:
        """These prompt blocks have become findable; no later step has been planned yet."""
        if computed:
            hashes, blocks = zip(*computed, strict=True)
            pending = self._backend.read_blocks(blocks, len(blocks) * self._block_size)
            self._connector.computed(hashes, pending)

    def _export(self, state: RequestState, end: int) -> None:
        start, size = state.num_exported_tokens, self._block_size
        if start >= end:
            return
        first, last = start // size, -(-end // size)
        blocks = self._backend.read_blocks(state.block_ids[first:last], end - start, start % size)
        full = range(-(-start // size), end // size)
        self._connector.exported(
            KVExport(
                request_id=state.request_id,
                start=start,
                end=end,
                blocks=blocks,
                block_hashes=state.block_hashes(full.stop, size)[full.start :],
            )
        )
        state.num_exported_tokens = end
        self._metrics.kv_exported_tokens += end - start
