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

Order of a tile's DMAs: its table; its new tokens, when the tile before it begins to be fetched; its queries and blocks.
A tile's blocks are fetched after the writes of all tiles up to it are done, and never further than its last token.
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
    Arrays,
    KernelSpec,
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
    row: Scalar
    start: Scalar  # its first token
    count: Scalar  # tokens
    first: Scalar  # position of its first token
    base: Scalar  # position where fetching starts
    end: Scalar  # position behind the last key
    num_blocks: Scalar


class Cursor(NamedTuple):
    tile: Scalar
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
    decoding: bool
    first: Scalar
    end: Scalar
    slots: int
    query_tile: int

    @cached_property
    def flash(self) -> Flash:
        return Flash(spec=self.spec, scalars=self.scalars, scratch=self.scratch, query_tile=self.query_tile)

    @property
    def buffers(self) -> QueryBuffers:
        buffers: QueryBuffers = self.scratch.decode if self.decoding else self.scratch.mixed
        return buffers

    # Where things are.

    def tile(self, index: Scalar) -> Tile:
        scalars, sizes = self.scalars, self.spec.sizes
        index = jnp.minimum(index, self.end - 1)
        row = index if self.decoding else scalars.tile_rows[index]
        begin = index if self.decoding else scalars.tile_starts[index]
        row_end = scalars.query_starts[row + 1]
        count = jnp.minimum(row_end - begin, self.query_tile)
        first = scalars.kv_lens[row] - (row_end - begin)
        oldest = jnp.maximum(first - scalars.limits[0] + 1, self._chunk_start(first))
        base = div(jnp.maximum(oldest, 0), sizes.unit) * sizes.unit
        num_blocks = ceil_div(first + count - base, sizes.block)
        return Tile(row, begin, count, first, base, first + count, num_blocks)

    def _chunk_start(self, position: Scalar) -> Scalar:
        return div(position, self.scalars.limits[1]) * self.scalars.limits[1]

    def _page(self, slot: Scalar, position: Scalar) -> Scalar:
        index = div(position, self.spec.block_size)
        return self.scratch.table[slot, div(index, LANES), 0, rem(index, LANES)]

    def advance(self, at: Cursor) -> Cursor:
        is_last = at.block + 1 >= self.tile(at.tile).num_blocks
        return Cursor(jnp.where(is_last, at.tile + 1, at.tile), jnp.where(is_last, 0, at.block + 1))

    # DMAs. Each is described twice, to start it and to wait for it.

    def _table(self, index: Scalar, act: Callable[[Any], None]) -> None:
        tile, slot = self.tile(index), rem(index, TABLE_SLOTS)
        entries = LANES * self.spec.block_size
        first = div(tile.base, entries)
        part = pl.ds(first, ceil_div(tile.end, entries) - first)
        source, target = self.arrays.tables.at[tile.row, part], self.scratch.table.at[slot, part]
        act(pltpu.make_async_copy(source, target, self.scratch.table_sems.at[slot]))

    def _start_write(self, index: Scalar) -> None:
        """Copies the tile's new tokens into their pages, page by page."""
        tile, size = self.tile(index), self.spec.block_size

        def one_page(page: Scalar, _: None) -> None:
            begin = jnp.maximum(page * size, tile.first)
            count = jnp.minimum((page + 1) * size, tile.end) - begin
            source = self.arrays.new.at[pl.ds(tile.start + begin - tile.first, count)]
            where = self._page(rem(index, TABLE_SLOTS), begin)
            target = self.arrays.cache.at[self.scalars.layer[0], where, pl.ds(rem(begin, size), count)]
            start(pltpu.make_async_copy(source, target, self.scratch.write_sems.at[rem(index, 2)]))

        lax.fori_loop(div(tile.first, size), ceil_div(tile.end, size), one_page, None)

    def _wait_write(self, index: Scalar) -> None:
        tile = self.tile(index)
        same_bytes = self.arrays.new.at[pl.ds(tile.start, tile.count)]
        wait(pltpu.make_async_copy(same_bytes, same_bytes, self.scratch.write_sems.at[rem(index, 2)]))

    def _queries(self, index: Scalar, act: Callable[[Any], None]) -> None:
        slot = rem(index, self.slots)
        self._tokens(index, self.arrays.queries, self.buffers.queries.at[slot], act, self.scratch.query_sems.at[slot])

    def _out(self, index: Scalar, act: Callable[[Any], None]) -> None:
        slot = rem(index, 2)
        self._tokens(index, self.arrays.out, self.buffers.out.at[slot], act, self.scratch.out_sems.at[slot], out=True)

    def _tokens(
        self, index: Scalar, hbm: Any, vmem: Any, act: Callable[[Any], None], sem: Any, out: bool = False
    ) -> None:
        """Moves a tile's tokens between HBM (token-major) and VMEM (head-major, so that a head's rows are together)."""
        tile = self.tile(index)

        def move(outside: Any, inside: Any) -> None:
            act(pltpu.make_async_copy(*((inside, outside) if out else (outside, inside)), sem))

        if self.query_tile == 1:
            move(hbm.at[tile.start], vmem.at[:, 0])
        else:
            tokens, begin = pl.ds(tile.start, tile.count), pl.ds(0, tile.count)

            def one_head(head: Scalar, _: None) -> None:
                move(hbm.at[tokens, head], vmem.at[head, begin])

            lax.fori_loop(0, self.spec.query_heads, one_head, None)

    def _start_block(self, at: Cursor, slot: Scalar) -> None:
        tile, sizes = self.tile(at.tile), self.spec.sizes
        begin = tile.base + at.block * sizes.block
        end = jnp.minimum(begin + sizes.block, tile.end)

        def one_unit(index: Scalar, _: None) -> None:
            position = begin + index * sizes.unit
            count = jnp.minimum(sizes.unit, end - position)
            page = self._page(rem(at.tile, TABLE_SLOTS), position)
            inside = pl.ds(rem(position, self.spec.block_size), count)
            source = self.arrays.cache.at[self.scalars.layer[0], page, inside]
            target = self.scratch.blocks.at[slot, pl.ds(index * sizes.unit, count)]
            start(pltpu.make_async_copy(source, target, self.scratch.block_sems.at[slot]))

        lax.fori_loop(0, ceil_div(end - begin, sizes.unit), one_unit, None)

    def _wait_block(self, tile: Tile, at: Cursor, slot: Scalar) -> None:
        size = self.spec.sizes.block
        count = jnp.minimum(size, tile.end - (tile.base + at.block * size))
        same_bytes = self.scratch.blocks.at[slot, pl.ds(0, count)]
        wait(pltpu.make_async_copy(same_bytes, same_bytes, self.scratch.block_sems.at[slot]))

    # The walk.

    def run(self) -> None:
        pl.when(self.first < self.end)(self._run)

    def _run(self) -> None:
        self._table(self.first, start)
        self._if_exists(self.first + 1, lambda: self._table(self.first + 1, start))
        self._table(self.first, wait)
        self._start_write(self.first)
        lead = self.slots - 1  # steps that fetching is ahead of computing

        def one_step(carry: tuple[Scalar, Cursor, Cursor]) -> tuple[Scalar, Cursor, Cursor]:
            step, at, ahead = carry
            following = self._fetch(ahead, rem(step, self.slots))
            pl.when(step >= lead)(lambda: self._compute(at, rem(step - lead, self.slots)))
            then = self.advance(at)
            reached = Cursor(*(jnp.where(step >= lead, new, old) for new, old in zip(then, at, strict=True)))
            return step + 1, reached, following

        begin = Cursor(jnp.int32(self.first), jnp.int32(0))
        lax.while_loop(lambda carry: carry[1].tile < self.end, one_step, (jnp.int32(0), begin, begin))
        pl.when(self.end - 2 >= self.first)(lambda: self._out(self.end - 2, wait))
        self._out(self.end - 1, wait)

    def _if_exists(self, index: Scalar, action: Callable[[], None]) -> None:
        pl.when(index < self.end)(action)

    def _fetch(self, at: Cursor, slot: Scalar) -> Cursor:
        """Starts the DMAs of the block at the cursor, if there is one."""

        def begin_tile() -> None:
            def prepare_next() -> None:
                self._table(at.tile + 1, wait)
                self._start_write(at.tile + 1)

            self._if_exists(at.tile + 1, prepare_next)
            self._if_exists(at.tile + 2, lambda: self._table(at.tile + 2, start))
            self._wait_write(at.tile)
            self._queries(at.tile, start)

        def begin_block() -> None:
            pl.when(at.block == 0)(begin_tile)
            self._start_block(at, slot)

        self._if_exists(at.tile, begin_block)
        return self.advance(at)

    def _compute(self, at: Cursor, slot: Scalar) -> None:
        tile = self.tile(at.tile)

        def begin_tile() -> None:
            self._queries(at.tile, wait)
            self.flash.begin()

        pl.when(at.block == 0)(begin_tile)
        self._wait_block(tile, at, slot)
        begin = tile.base + at.block * self.spec.sizes.block
        self._clear_tail(slot, tile.end - begin)
        queries = self.buffers.queries.at[rem(at.tile, self.slots)]
        self.flash.attend(queries, self.scratch.blocks.at[slot], tile.first, begin)

        def end_tile() -> None:
            pl.when(at.tile - 2 >= self.first)(lambda: self._out(at.tile - 2, wait))
            self.flash.finish(self.buffers.out.at[rem(at.tile, 2)])
            self._out(at.tile, start)

        pl.when(at.block + 1 == tile.num_blocks)(end_tile)

    def _clear_tail(self, slot: Scalar, live: Scalar) -> None:
        """Zeros what is no key of this row: weight 0 times what was left there could be NaN."""
        rows, size, lanes = self.spec.layout.word_rows, self.spec.sizes.block, self.flash.lanes

        def clear(index: Scalar, _: None) -> None:
            begin = index * CLEAR_TOKENS
            part = self.scratch.blocks.at[slot, pl.ds(begin, CLEAR_TOKENS)]
            keep = lax.broadcasted_iota(jnp.int32, (CLEAR_TOKENS * rows, LANES), 0) < (live - begin) * rows
            lanes.write(part, jnp.where(keep, lanes.read(part), jnp.uint32(0)))

        lax.fori_loop(div(jnp.minimum(live, size), CLEAR_TOKENS), size // CLEAR_TOKENS, clear, None)


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
            decoding=True,
            first=0,
            end=counts[0],
            slots=spec.sizes.slots,
            query_tile=1,
        )
        decode.run()
        if not spec.decode_only:
            replace(decode, decoding=False, end=counts[1], slots=MIXED_SLOTS, query_tile=spec.sizes.query_tile).run()
