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

Order of a tile's DMAs: its table; its new tokens (when the tile before it starts to be fetched); its queries and blocks.
A tile's blocks are fetched after the writes of all tiles up to it are done, and never further than its last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention.tiling import BlockSizes
from backends.jax.attention.words import LANES, WordLayout

Scalar = Any  # a traced int32, or a Python int
HIDDEN = -1e30
"""The score of a key that a query doesn't see: its weight vanishes against any key that it does."""
MIXED_SLOTS = 2
TABLE_SLOTS = 3
CLEAR_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """What a compiled kernel is made for."""

    layout: WordLayout
    sizes: BlockSizes
    group: int  # query heads of a kv head, padded to whole words
    block_size: int
    soft_cap: float | None
    has_sinks: bool
    decode_only: bool
    interpret: bool

    @property
    def compute_dtype(self) -> Any:
        return jnp.float32 if self.layout.dtype == "float32" else jnp.bfloat16

    @property
    def query_packing(self) -> int:
        return 1 if self.layout.dtype == "float32" else 2

    @property
    def query_heads(self) -> int:
        """Lane rows of a token's queries, in groups."""
        return self.layout.num_kv_heads * self.layout.chunks


class Scalars(NamedTuple):
    """In SMEM from the start."""

    layer: Any  # [1]
    limits: Any  # [2] window, chunk
    counts: Any  # [2] decoding rows, tiles
    kv_lens: Any  # [R]
    query_starts: Any  # [R + 1]
    tile_rows: Any  # [N]
    tile_starts: Any  # [N]
    sinks: Any  # [heads] float32


class Arrays(NamedTuple):
    """In HBM."""

    queries: Any  # [T, query_heads, group / packing, packing, 128]
    new: Any  # [T, R, 1, 128] uint32, words of the step's tokens
    tables: Any  # [rows, C, 1, 128] int32
    out: Any  # like queries, and the same memory
    cache: Any  # [layers, blocks, block_size, R, 1, 128] uint32


class Scratch(NamedTuple):
    """In VMEM, tables in SMEM."""

    table: Any  # [TABLE_SLOTS, C, 1, 128] int32
    blocks: Any  # [slots, block, R, 1, 128] uint32
    queries: Any  # [slots, query_heads, query_tile, group / packing, packing, 128]
    out: Any  # [2, ...] like queries
    maximum: Any  # [kv_heads, query rows, 128] float32
    total: Any  # [kv_heads, query rows, 128] float32
    weighted: Any  # [query_heads, query rows, 128] float32
    table_sems: Any  # [TABLE_SLOTS]
    write_sems: Any  # [2]
    block_sems: Any  # [slots]
    query_sems: Any  # [slots]
    out_sems: Any  # [2]


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


def div(a: Scalar, b: Scalar) -> Any:
    """a // b of non-negative numbers: `//` on traced ones rounds negative quotients too, at a price."""
    return lax.div(jnp.int32(a), jnp.int32(b))


def rem(a: Scalar, b: Scalar) -> Any:
    return lax.rem(jnp.int32(a), jnp.int32(b))


def ceil_div(a: Scalar, b: Scalar) -> Any:
    return div(a + b - 1, b)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


@dataclass(frozen=True, kw_only=True)
class Phase:
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
        self._tokens(index, self.arrays.queries, self.scratch.queries.at[slot], act, self.scratch.query_sems.at[slot])

    def _out(self, index: Scalar, act: Callable[[Any], None]) -> None:
        slot = rem(index, 2)
        self._tokens(index, self.arrays.out, self.scratch.out.at[slot], act, self.scratch.out_sems.at[slot], out=True)

    def _tokens(
        self, index: Scalar, hbm: Any, vmem: Any, act: Callable[[Any], None], sem: Any, out: bool = False
    ) -> None:
        """Moves a tile's tokens between HBM (token-major) and VMEM (head-major, so that a head's rows are together)."""
        tile = self.tile(index)
        if self.query_tile == 1:
            pairs = [(hbm.at[tile.start], vmem.at[:, 0])]
        else:
            tokens = pl.ds(tile.start, tile.count)
            heads = range(self.spec.query_heads)
            pairs = [(hbm.at[tokens, head], vmem.at[head, pl.ds(0, tile.count)]) for head in heads]
        for outside, inside in pairs:
            act(pltpu.make_async_copy(inside, outside, sem) if out else pltpu.make_async_copy(outside, inside, sem))

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
        ahead = Cursor(jnp.int32(self.first), jnp.int32(0))
        for slot in range(self.slots - 1):
            ahead = self._fetch(ahead, slot)

        def one_block(carry: tuple[Scalar, Cursor, Cursor]) -> tuple[Scalar, Cursor, Cursor]:
            step, at, ahead = carry
            ahead = self._fetch(ahead, rem(step + self.slots - 1, self.slots))
            self._compute(at, rem(step, self.slots))
            return step + 1, self.advance(at), ahead

        begin = (jnp.int32(0), Cursor(jnp.int32(self.first), jnp.int32(0)), ahead)
        lax.while_loop(lambda carry: carry[1].tile < self.end, one_block, begin)
        for last in (self.end - 2, self.end - 1):
            pl.when(last >= self.first)(lambda last=last: self._out(last, wait))

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
            self._begin_softmax()

        pl.when(at.block == 0)(begin_tile)
        self._wait_block(tile, at, slot)
        begin = tile.base + at.block * self.spec.sizes.block
        self._clear_tail(slot, tile.end - begin)
        self._attend(rem(at.tile, self.slots), slot, self._seen(tile, begin))

        def end_tile() -> None:
            pl.when(at.tile - 2 >= self.first)(lambda: self._out(at.tile - 2, wait))
            self._finish_softmax(rem(at.tile, 2))
            self._out(at.tile, start)

        pl.when(at.block + 1 == tile.num_blocks)(end_tile)

    # The numbers.

    @property
    def rows(self) -> int:
        return self.query_tile * self.spec.group

    def _clear_tail(self, slot: Scalar, live: Scalar) -> None:
        """Zeros what is not a key of this row: weight 0 times what was left there could be NaN."""
        rows, size = self.spec.layout.word_rows, self.spec.sizes.block

        def clear(index: Scalar, _: None) -> None:
            part = self.scratch.blocks.at[slot, pl.ds(index * CLEAR_TOKENS, CLEAR_TOKENS)]
            keep = (
                lax.broadcasted_iota(jnp.int32, (CLEAR_TOKENS * rows, LANES), 0) < (live - index * CLEAR_TOKENS) * rows
            )
            self._write(part, jnp.where(keep, self._read(part), jnp.uint32(0)))

        lax.fori_loop(div(jnp.minimum(live, size), CLEAR_TOKENS), size // CLEAR_TOKENS, clear, None)

    def _seen(self, tile: Tile, begin: Scalar) -> jax.Array:
        """[rows, block]: which keys, from position `begin` on, each query row sees."""
        shape = (self.rows, self.spec.sizes.block)
        window, chunk = self.scalars.limits[0], self.scalars.limits[1]
        key = begin + lax.broadcasted_iota(jnp.int32, shape, 1)
        if self.query_tile == 1:
            oldest = jnp.maximum(tile.first - window + 1, self._chunk_start(tile.first))
            return (key >= oldest) & (key <= tile.first)
        token = lax.div(lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0), jnp.int32(self.spec.group))
        position = tile.first + token
        # Whole chunks between the first query's chunk and each query's: small numbers, exact in float32.
        chunk_start = self._chunk_start(tile.first)
        inside = (position - chunk_start).astype(jnp.float32) + 0.5
        chunks = jnp.floor(inside / lax.convert_element_type(chunk, jnp.float32)).astype(jnp.int32)
        oldest = jnp.maximum(position - window + 1, chunk_start + chunks * chunk)
        return (key >= oldest) & (key <= position)

    def _begin_softmax(self) -> None:
        scratch, rows = self.scratch, self.rows
        for head in range(self.spec.layout.num_kv_heads):
            if self.spec.has_sinks:
                member = lax.rem(lax.broadcasted_iota(jnp.int32, (rows, LANES), 0), jnp.int32(self.spec.group))
                sink = jnp.zeros((rows, LANES), jnp.float32)
                for index in range(self.spec.group):
                    logit = self.scalars.sinks[head * self.spec.group + index]
                    sink = jnp.where(member == index, logit, sink)
                scratch.maximum[head, :rows] = sink
                scratch.total[head, :rows] = jnp.ones((rows, LANES), jnp.float32)
            else:
                scratch.maximum[head, :rows] = jnp.full((rows, LANES), HIDDEN, jnp.float32)
                scratch.total[head, :rows] = jnp.zeros((rows, LANES), jnp.float32)
        for head in range(self.spec.query_heads):
            scratch.weighted[head, :rows] = jnp.zeros((rows, LANES), jnp.float32)

    def _attend(self, query_slot: Scalar, slot: Scalar, seen: jax.Array) -> None:
        layout = self.spec.layout
        lane_rows = LaneRows(self, self.scratch.blocks.at[slot])
        for head in range(layout.num_kv_heads):
            queries = [self._query_rows(query_slot, head * layout.chunks + c) for c in range(layout.chunks)]
            keys = [lane_rows[layout.key_row(head, c)] for c in range(layout.chunks)]
            values = [lane_rows[layout.value_row(head, c)] for c in range(layout.chunks)]
            scores = self._product(queries[0], keys[0], 1)
            for chunk in range(1, layout.chunks):
                scores += self._product(queries[chunk], keys[chunk], 1)
            if self.spec.soft_cap is not None:
                scores = self.spec.soft_cap * jnp.tanh(scores / self.spec.soft_cap)
            self._accumulate(head, jnp.where(seen, scores, HIDDEN), values)

    def _accumulate(self, head: int, scores: jax.Array, values: list[jax.Array]) -> None:
        scratch, rows, chunks = self.scratch, self.rows, self.spec.layout.chunks
        before = scratch.maximum[head, :rows]
        after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - after[:, :1])
        shrink = jnp.exp(before - after)
        scratch.maximum[head, :rows] = after
        scratch.total[head, :rows] = shrink * scratch.total[head, :rows] + jnp.sum(weights, axis=1, keepdims=True)
        for chunk, value in enumerate(values):
            at = head * chunks + chunk
            product = self._product(weights.astype(self.spec.compute_dtype), value, 0)
            scratch.weighted[at, :rows] = shrink * scratch.weighted[at, :rows] + product

    def _finish_softmax(self, slot: Scalar) -> None:
        scratch, chunks = self.scratch, self.spec.layout.chunks
        for head in range(self.spec.query_heads):
            out = scratch.weighted[head, : self.rows] / scratch.total[head // chunks, : self.rows]
            self._write_out(slot, head, out.astype(self.spec.compute_dtype))

    def _product(self, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
        exact = self.spec.compute_dtype == jnp.float32
        return lax.dot_general(
            a,
            b,
            (((1,), (axis,)), ((), ())),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )

    # Rows of 128 lanes out of buffers whose tokens and heads are apart. Interpret mode can't reshape references, and
    # reshapes what it reads instead: the only difference between what is tested on CPU and what runs on TPU.

    def _read(self, ref: Any, first: int = 0, stride: int = 1) -> jax.Array:
        """Every stride-th row of a reference [..., 1, 128] of 32-bit elements, from the first on."""
        rows = math.prod(ref.shape) // LANES
        if self.spec.interpret:
            return ref[...].reshape(rows, LANES)[first::stride]
        return ref.reshape(rows, LANES)[pl.ds(first, -(-(rows - first) // stride), stride), :]

    def _write(self, ref: Any, value: jax.Array) -> None:
        if self.spec.interpret:
            ref[...] = value.reshape(ref.shape)
        else:
            ref.reshape(*value.shape)[...] = value

    def _query_rows(self, slot: Scalar, head: int) -> jax.Array:
        ref = self.scratch.queries.at[slot, head, pl.ds(0, self.query_tile)]
        if self.spec.query_packing == 1:
            return self._read(ref)
        if self.spec.interpret:
            return ref[...].reshape(self.rows, LANES)
        return pltpu.bitcast(self._read(ref.bitcast(jnp.uint32)), jnp.bfloat16)

    def _write_out(self, slot: Scalar, head: int, value: jax.Array) -> None:
        ref = self.scratch.out.at[slot, head, pl.ds(0, self.query_tile)]
        if self.spec.query_packing == 1 or self.spec.interpret:
            self._write(ref, value)
        else:
            self._write(ref.bitcast(jnp.uint32), pltpu.bitcast(value, jnp.uint32))


class LaneRows:
    """The lane rows of a block [tokens, R, 1, 128], unpacked from their words when first asked for."""

    def __init__(self, phase: Phase, block: Any) -> None:
        self._phase = phase
        self._block = block
        self._layout = phase.spec.layout
        self._found: dict[int, jax.Array] = {}

    def __getitem__(self, index: int) -> jax.Array:
        """[tokens, 128] in the type that is multiplied."""
        if index not in self._found:
            word_row = index // self._layout.packing
            parts = self._unpack(word_row)
            self._found.update({word_row * self._layout.packing + part: rows for part, rows in enumerate(parts)})
        return self._found[index]

    def _unpack(self, word_row: int) -> list[jax.Array]:
        rows, read = self._layout.word_rows, self._phase._read
        if self._layout.packing == 1:
            return [pltpu.bitcast(read(self._block, word_row, rows), jnp.float32)]
        if self._layout.packing == 2:
            # Words of even and odd tokens, exchanged: half a register's work of going through float32.
            even = read(self._block, word_row, 2 * rows)
            odd = read(self._block, word_row + rows, 2 * rows)
            low = (even & jnp.uint32(0xFFFF)) | (odd << 16)
            high = (even >> 16) | (odd & jnp.uint32(0xFFFF0000))
            return [pltpu.bitcast(low, jnp.bfloat16), pltpu.bitcast(high, jnp.bfloat16)]
        words = read(self._block, word_row, rows)
        convert = int8_at if self._layout.dtype == "int8" else float8_at
        return [convert(words, part).astype(jnp.bfloat16) for part in range(4)]


def int8_at(words: jax.Array, part: int) -> jax.Array:
    """Byte `part` of each word as float32."""
    signed = pltpu.bitcast(words << (24 - 8 * part), jnp.int32) >> 24
    return signed.astype(jnp.float32)


def float8_at(words: jax.Array, part: int) -> jax.Array:
    """Byte `part` of each word, an e4m3fn number (finite ones only are stored), as float32."""
    byte = words >> (8 * part)
    magnitude = (byte & jnp.uint32(0x7F)) << 20  # exponent and mantissa where float32 has them
    normal = pltpu.bitcast(magnitude + jnp.uint32(120 << 23), jnp.float32)
    # Exponent 0 has no hidden one: taken for 2^-7 (1 + m / 8), it is 2^-6 m / 8.
    value = jnp.where(magnitude < jnp.uint32(1 << 23), 2 * normal - 2**-6, normal)
    sign = (byte & jnp.uint32(0x80)) << 24
    return pltpu.bitcast(pltpu.bitcast(value, jnp.uint32) | sign, jnp.float32)
