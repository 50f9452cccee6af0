"""The TPU kernel: writes a step's keys and values into their pages and attends, for a ragged batch, in one call.

One program walks over *tiles* (some query tokens of one row) and, for each, over blocks of its keys and values. A ring
of VMEM buffers runs ahead of it: while a block is multiplied, DMAs fetch the blocks that follow, across the borders of
tiles and rows. Decoding rows come first, as tiles of one token with a deep ring; then tiles of prompts.

Traffic: a tile reads each live key and value of its row once, for all query heads (decode: once a row and step), from
the first page that the window or chunk of its first query reaches to the last key that its last query sees; the last
page up to that key only. A prompt's tokens are read once per later tile of the same prompt. New keys and values go
from HBM to HBM, token by token exact; queries and outputs once each, the outputs over the queries. Padding tokens and
padding rows cost nothing. Block tables stay in HBM: a row's entries come to SMEM when its turn comes, so that neither
rows nor context are limited by SMEM.

Order of a tile's DMAs: its table, some tiles ahead; its new tokens, fewer tiles ahead; its queries and blocks. A tile's
blocks are fetched after the writes of all tiles up to it are done, and never further than its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention.pallas.flash import Flash
from backends.jax.attention.pallas.refs import (
    MIXED_SLOTS,
    TABLE_SLOTS,
    TABLES_AHEAD,
    WRITE_SLOTS,
    WRITES_AHEAD,
    Arrays,
    KernelSpec,
    Limits,
    QueryBuffers,
    Scalar,
    Scalars,
    Scratch,
    ceil_div,
    div,
    rem,
)
from backends.jax.attention.pallas.words import LANES

CLEAR_TOKENS = 32


class Tile(NamedTuple):
    index: Scalar
    row: Scalar
    start: Scalar  # its first token
    count: Scalar  # tokens
    first: Scalar  # position of its first token
    base: Scalar  # position where fetching starts
    end: Scalar  # position behind the last key


class Cursor(NamedTuple):
    tile: Tile
    block: Scalar


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A walk over tiles of one size."""

    spec: KernelSpec
    scalars: Scalars
    arrays: Arrays
    scratch: Scratch
    limits: Limits
    layer: Scalar
    decoding: bool
    first: Scalar
    end: Scalar
    slots: int
    query_tile: int

    @cached_property
    def flash(self) -> Flash:
        return Flash(
            spec=self.spec,
            sinks=self.scalars.sinks,
            limits=self.limits,
            scratch=self.scratch,
            query_tile=self.query_tile,
        )

    @property
    def buffers(self) -> QueryBuffers:
        buffers: QueryBuffers = self.scratch.decode if self.decoding else self.scratch.mixed
        return buffers

    # Where things are.

    def tile(self, index: Scalar) -> Tile:
        """The tile of an index; behind the last one, the last tile's data under that index."""
        scalars, unit = self.scalars, self.spec.sizes.unit
        known = jnp.minimum(index, self.end - 1)
        row = known if self.decoding else scalars.tile_rows[known]
        begin = known if self.decoding else scalars.tile_starts[known]
        to_come = scalars.query_starts[row + 1] - begin
        first = scalars.kv_lens[row] - to_come
        count = jnp.minimum(to_come, self.query_tile)
        base = div(self.limits.oldest(first), unit) * unit
        return Tile(index, row, begin, count, first, base, first + count)

    def _block(self, at: Cursor) -> tuple[Scalar, Scalar]:
        """Position of the block's first key, and behind its last one."""
        begin = at.tile.base + at.block * self.spec.sizes.block
        return begin, jnp.minimum(begin + self.spec.sizes.block, at.tile.end)

    def _is_last(self, at: Cursor) -> Any:
        return at.tile.base + (at.block + 1) * self.spec.sizes.block >= at.tile.end

    def _page(self, tile: Tile, position: Scalar) -> Scalar:
        index = div(position, self.spec.block_size)
        return self.scratch.table[rem(tile.index, TABLE_SLOTS), div(index, LANES), 0, rem(index, LANES)]

    def advance(self, at: Cursor) -> Cursor:
        def next_tile() -> Cursor:
            return Cursor(self.tile(at.tile.index + 1), jnp.int32(0))

        following: Cursor = lax.cond(self._is_last(at), next_tile, lambda: Cursor(at.tile, at.block + 1))
        return following

    # DMAs. Each is described twice, to start it and to wait for it.

    def _table(self, tile: Tile, act: Callable[[Any], None]) -> None:
        slot, entries = rem(tile.index, TABLE_SLOTS), LANES * self.spec.block_size
        first = div(tile.base, entries)
        part = pl.ds(first, ceil_div(tile.end, entries) - first)
        source, target = self.arrays.tables.at[tile.row, part], self.scratch.table.at[slot, part]
        act(pltpu.make_async_copy(source, target, self.scratch.table_sems.at[slot]))

    def _start_write(self, tile: Tile) -> None:
        """Copies the tile's new tokens into their pages, page by page."""
        size, sem = self.spec.block_size, self.scratch.write_sems.at[rem(tile.index, WRITE_SLOTS)]

        def one_page(page: Scalar, _: None) -> None:
            begin = jnp.maximum(page * size, tile.first)
            count = jnp.minimum((page + 1) * size, tile.end) - begin
            source = self.arrays.new.at[pl.ds(tile.start + begin - tile.first, count)]
            inside = pl.ds(rem(begin, size), count)
            target = self.arrays.cache.at[self.layer, self._page(tile, begin), inside]
            start(pltpu.make_async_copy(source, target, sem))

        lax.fori_loop(div(tile.first, size), ceil_div(tile.end, size), one_page, None)

    def _wait_write(self, tile: Tile) -> None:
        sem = self.scratch.write_sems.at[rem(tile.index, WRITE_SLOTS)]
        same_bytes = self.arrays.new.at[pl.ds(tile.start, tile.count)]
        wait(pltpu.make_async_copy(same_bytes, same_bytes, sem))

    def _queries(self, tile: Tile, act: Callable[[Any], None]) -> None:
        slot = rem(tile.index, self.slots)
        self._tokens(tile, self.arrays.queries, self.buffers.queries.at[slot], act, self.scratch.query_sems.at[slot])

    def _out(self, tile: Tile, act: Callable[[Any], None]) -> None:
        slot = rem(tile.index, 2)
        self._tokens(tile, self.arrays.out, self.buffers.out.at[slot], act, self.scratch.out_sems.at[slot], out=True)

    def _tokens(self, tile: Tile, hbm: Any, vmem: Any, act: Callable[[Any], None], sem: Any, out: bool = False) -> None:
        """Moves a tile's tokens between HBM (token-major) and VMEM (head-major, so that a head's rows are together)."""

        def move(outside: Any, inside: Any) -> None:
            act(pltpu.make_async_copy(*((inside, outside) if out else (outside, inside)), sem))

        def one_head(head: Scalar, _: None) -> None:
            tokens, begin = pl.ds(tile.start, tile.count), pl.ds(0, tile.count)
            move(hbm.at[tokens, head], vmem.at[head, begin])

        if self.query_tile == 1:
            move(hbm.at[tile.start], vmem.at[:, 0])
        else:
            lax.fori_loop(0, self.spec.query_heads, one_head, None)

    def _start_block(self, at: Cursor, slot: Scalar) -> None:
        unit, (begin, end) = self.spec.sizes.unit, self._block(at)

        def one_unit(index: Scalar, _: None) -> None:
            position = begin + index * unit
            count = jnp.minimum(unit, end - position)
            inside = pl.ds(rem(position, self.spec.block_size), count)
            source = self.arrays.cache.at[self.layer, self._page(at.tile, position), inside]
            target = self.scratch.blocks.at[slot, pl.ds(index * unit, count)]
            start(pltpu.make_async_copy(source, target, self.scratch.block_sems.at[slot]))

        lax.fori_loop(0, ceil_div(end - begin, unit), one_unit, None)

    def _wait_block(self, at: Cursor, slot: Scalar) -> None:
        begin, end = self._block(at)
        same_bytes = self.scratch.blocks.at[slot, pl.ds(0, end - begin)]
        wait(pltpu.make_async_copy(same_bytes, same_bytes, self.scratch.block_sems.at[slot]))

    # The walk.

    def run(self) -> None:
        pl.when(self.first < self.end)(self._run)

    def _run(self) -> None:
        self._for_tiles(self.first, TABLES_AHEAD, lambda tile: self._table(tile, start))
        self._for_tiles(self.first, WRITES_AHEAD, self._prepare)
        lead = self.slots - 1  # steps that fetching is ahead of computing

        def one_step(carry: tuple[Scalar, Cursor, Cursor]) -> tuple[Scalar, Cursor, Cursor]:
            step, at, ahead = carry
            pl.when(ahead.tile.index < self.end)(lambda: self._fetch(ahead, rem(step, self.slots)))

            def compute() -> Cursor:
                self._compute(at, rem(step - lead, self.slots))
                return self.advance(at)

            return step + 1, lax.cond(step >= lead, compute, lambda: at), self.advance(ahead)

        begin = Cursor(self.tile(jnp.int32(self.first)), jnp.int32(0))
        lax.while_loop(lambda carry: carry[1].tile.index < self.end, one_step, (jnp.int32(0), begin, begin))
        self._for_tiles(jnp.maximum(self.end - 2, self.first), 2, lambda tile: self._out(tile, wait))

    def _for_tiles(self, first: Scalar, count: int, action: Callable[[Tile], None]) -> None:
        """Calls action with up to `count` tiles from the first on: those that exist."""
        last = jnp.minimum(first + count, self.end)
        lax.fori_loop(first, last, lambda index, _: action(self.tile(index)), None)

    def _prepare(self, tile: Tile) -> None:
        """Starts to write a tile's new tokens, when it is known where."""
        self._table(tile, wait)
        self._start_write(tile)

    def _fetch(self, at: Cursor, slot: Scalar) -> None:
        """Starts the DMAs of the block at the cursor."""

        def begin_tile() -> None:
            index = at.tile.index
            self._for_tiles(index + TABLES_AHEAD, 1, lambda tile: self._table(tile, start))
            self._for_tiles(index + WRITES_AHEAD, 1, self._prepare)
            self._wait_write(at.tile)
            self._queries(at.tile, start)

        pl.when(at.block == 0)(begin_tile)
        self._start_block(at, slot)

    def _compute(self, at: Cursor, slot: Scalar) -> None:
        tile = at.tile

        def begin_tile() -> None:
            self._queries(tile, wait)
            self.flash.begin()

        def end_tile() -> None:
            pl.when(tile.index - 2 >= self.first)(lambda: self._out(self.tile(tile.index - 2), wait))
            self.flash.finish(self.buffers.out.at[rem(tile.index, 2)])
            self._out(tile, start)

        pl.when(at.block == 0)(begin_tile)
        self._wait_block(at, slot)
        begin, end = self._block(at)
        self._clear_tail(slot, end - begin)
        queries = self.buffers.queries.at[rem(tile.index, self.slots)]
        self.flash.attend(queries, self.scratch.blocks.at[slot], tile.first, begin)
        pl.when(self._is_last(at))(end_tile)

    def _clear_tail(self, slot: Scalar, live: Scalar) -> None:
        """Zeros what is no key of this row: weight 0 times what was left there could be NaN."""
        rows, size, lanes = self.spec.layout.word_rows, self.spec.sizes.block, self.flash.lanes

        def clear(index: Scalar, _: None) -> None:
            begin = index * CLEAR_TOKENS
            part = self.scratch.blocks.at[slot, pl.ds(begin, CLEAR_TOKENS)]
            keep = lax.broadcasted_iota(jnp.int32, (CLEAR_TOKENS * rows, LANES), 0) < (live - begin) * rows
            lanes.write(part, jnp.where(keep, lanes.read(part), jnp.uint32(0)))

        lax.fori_loop(div(live, CLEAR_TOKENS), size // CLEAR_TOKENS, clear, None)


@dataclass(frozen=True)
class Kernel:
    """The body of the pallas_call."""

    spec: KernelSpec

    def __call__(self, *refs: Any) -> None:
        scalars, refs = Scalars(*refs[: len(Scalars._fields)]), refs[len(Scalars._fields) :]
        queries, new, tables, _, out, cache = refs[:6]
        spec, counts = self.spec, scalars.counts
        decode = Walk(
            spec=spec,
            scalars=scalars,
            arrays=Arrays(queries=queries, new=new, tables=tables, out=out, cache=cache),
            scratch=Scratch(*refs[6:]),
            limits=Limits(scalars.limits[0], scalars.limits[1]),
            layer=scalars.layer[0],
            decoding=True,
            first=0,
            end=counts[0],
            slots=spec.sizes.slots,
            query_tile=1,
        )
        decode.run()
        if not spec.decode_only:
            replace(decode, decoding=False, end=counts[1], slots=MIXED_SLOTS, query_tile=spec.sizes.query_tile).run()
