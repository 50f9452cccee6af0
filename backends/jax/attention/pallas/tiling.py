"""How the TPU kernel cuts its work: block sizes by a rule, and the list of query tiles of a step.

Sizes are not measured (they were chosen without a TPU) but derived, so that every shape has them:

- A *KV block* is what one step waits for: as many tokens as fit BLOCK_BYTES, a power of two between 128 (a matrix
  unit's side) and 512. Tiles of prompts take it in parts, so that one head's scores stay within SCORES.
- The ring of KV blocks is as deep as RING_BYTES allow, 2 to 8: HBM needs about a megabyte in flight to run at full
  speed, and short contexts with one kv head a chip fill only small blocks.
- A *unit* is what one DMA moves: a page, or the KV block where pages are larger (2048, 8192).
- A *query tile* is as many tokens of one row as share a fetch of its KV: up to 512 query rows (tokens times the query
  heads of a kv head), where reading KV once a tile is no longer what limits v5e and v5p, within STATE_BYTES of softmax
  state. A decoding row is a tile of one token.

A shape that deserves other numbers is an entry in TUNED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax.attention.base import AttentionInputs
from backends.jax.attention.pallas.words import LANES, WORD_ROW_BYTES, WordLayout

BLOCK_BYTES = 1 << 20
RING_BYTES = 4 << 20
STATE_BYTES = 5 << 20
MAX_BLOCK = 512  # tokens
SCORES = 1 << 17  # float32: 512 KiB
MAX_QUERY_ROWS = 512
MAX_QUERY_TILE = 128  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    unit: int  # tokens that one DMA moves
    block: int  # tokens of a KV block
    part: int  # tokens that a tile of a prompt takes of it at one time
    slots: int  # blocks in the ring while decoding
    query_tile: int  # tokens


TUNED: Mapping[tuple[int, int, int, str, int], BlockSizes] = {}
"""Sizes measured to be better than the rule's, by (kv heads, queries per kv head, head_dim, dtype, block_size)."""


def block_sizes(layout: WordLayout, group: int, block_size: int) -> BlockSizes:
    """The sizes for a chip's kv heads with `group` query heads each."""
    key = (layout.num_kv_heads, group, layout.head_dim, layout.dtype, block_size)
    if key in TUNED:
        return TUNED[key]
    token_bytes = layout.word_rows * WORD_ROW_BYTES
    block = _power_of_two(BLOCK_BYTES // token_bytes, 128, MAX_BLOCK)
    compute_bytes = 4 if layout.dtype == "float32" else 2
    heads = layout.num_kv_heads * group
    # Maximum, sum and accumulator of a query row, and its queries and outputs in two buffers each.
    row_bytes = LANES * 4 * (2 + layout.chunks) + 4 * LANES * layout.chunks * compute_bytes
    most = min(STATE_BYTES // (heads * row_bytes), MAX_QUERY_ROWS // group)
    query_tile = _power_of_two(most, 8, MAX_QUERY_TILE)
    return BlockSizes(
        unit=min(block_size, block),
        block=block,
        part=_power_of_two(SCORES // (query_tile * group), 128, block),
        slots=max(2, min(8, RING_BYTES // (block * token_bytes))),
        query_tile=query_tile,
    )


def _power_of_two(value: int, least: int, most: int) -> int:
    """The largest power of two up to value, within limits."""
    return max(least, min(most, 1 << max(0, value.bit_length() - 1)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QueryTiles:
    """Rows that decode, and tiles of the others' tokens; in ascending order of tokens, none is empty."""

    num_decode: jax.Array  # [] int32: the first so many rows have one query token each
    num_tiles: jax.Array  # [] int32, of the rows behind them
    rows: jax.Array  # [N] int32
    starts: jax.Array  # [N] int32, the first token of each tile

    @classmethod
    def of(cls, inputs: AttentionInputs, query_tile: int) -> QueryTiles:
        rows = inputs.kv_lens.shape[0]
        if inputs.decode_only:
            nothing = jnp.zeros((1,), jnp.int32)
            return cls(num_decode=inputs.num_rows[0], num_tiles=jnp.int32(0), rows=nothing, starts=nothing)
        lens = jnp.diff(inputs.query_starts)
        is_one = (lens == 1) & (jnp.arange(rows) < inputs.num_rows[0])
        num_decode = jnp.sum(jnp.cumprod(is_one.astype(jnp.int32)), dtype=jnp.int32)
        tiles_of_row = jnp.where(jnp.arange(rows) < num_decode, 0, -(-lens // query_tile))
        ends = jnp.cumsum(tiles_of_row, dtype=jnp.int32)
        most = -(-inputs.positions.shape[0] // query_tile) + rows
        index = jnp.arange(most, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), rows - 1).astype(jnp.int32)
        in_row = index - (ends[row] - tiles_of_row[row])
        starts = inputs.query_starts[row] + in_row * query_tile
        return cls(num_decode=num_decode, num_tiles=ends[-1], rows=row, starts=starts)
