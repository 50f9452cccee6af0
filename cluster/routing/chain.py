"""Short block hashes: those of a request's prompt, computed as far as somebody asks, and those of an engine's cache."""

from __future__ import annotations

from collections.abc import Mapping

from engine.kv_cache import block_hashes, request_root
from engine.request import EngineRequest

SHORT_HASH_BYTES = 8
"""How much of a block's hash routers keep and engines send: a mistake costs a prefill, and is a matter of 2**64."""


def shortened(changes: Mapping[bytes, bool]) -> tuple[list[bytes], list[bytes]]:
    """Short hashes of what an engine's cache has gained, and of what it has lost (EngineNews.cache)."""
    added = [known_as[:SHORT_HASH_BYTES] for known_as, is_here in changes.items() if is_here]
    removed = [known_as[:SHORT_HASH_BYTES] for known_as, is_here in changes.items() if not is_here]
    return added, removed


class PrefixChain:
    """The engine's own hashes, so that they name blocks that engines have; truncated once they are computed."""

    __slots__ = ("_coming", "_hashes", "num_blocks")

    def __init__(self, request: EngineRequest, block_size: int) -> None:
        tokens = request.prompt_token_ids + request.output_token_ids
        self._coming = block_hashes(request_root(request), tokens, block_size)
        self._hashes: list[bytes] = []
        self.num_blocks = (len(tokens) - 1) // block_size  # full ones; the engine always computes the last token

    def __getitem__(self, index: int) -> bytes:
        """The short hash of one block."""
        hashes = self._hashes
        while len(hashes) <= index:
            hashes.append(next(self._coming)[:SHORT_HASH_BYTES])
        return hashes[index]
