"""What a kernel is made for, and the references that its parts share: scalars, HBM arrays and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention.pallas.tiling import BlockSizes
from backends.jax.attention.pallas.words import LANES, WordLayout

Scalar = Any  # a traced int32, or a Python int
MIXED_SLOTS = 2
TABLES_AHEAD = 4  # tiles
WRITES_AHEAD = 2
TABLE_SLOTS = TABLES_AHEAD + 1
WRITE_SLOTS = WRITES_AHEAD + 1


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


class Limits(NamedTuple):
    """How far back queries see, in tokens."""

    window: Scalar
    chunk: Scalar

    def oldest(self, position: Scalar) -> Any:
        """The first position that a query sees."""
        return jnp.maximum(jnp.maximum(position - self.window + 1, self.chunk_start(position)), 0)

    def chunk_start(self, position: Scalar) -> Any:
        return div(position, self.chunk) * self.chunk


class QueryBuffers(NamedTuple):
    """In VMEM: a ring of tiles' queries, and two tiles' outputs."""

    queries: Any  # [slots, query_heads, query_tile, group / packing, packing, 128]
    out: Any  # [2, ...]


class Scratch(NamedTuple):
    """In VMEM; tables in SMEM."""

    table: Any  # [TABLE_SLOTS, C, 1, 128] int32
    blocks: Any  # [slots, block, R, 1, 128] uint32
    maximum: Any  # [kv_heads, query rows, 128] float32, and the two behind it alike
    total: Any
    weighted: Any  # [query_heads, ...]
    decode: Any  # QueryBuffers of one token a tile
    mixed: Any  # QueryBuffers
    table_sems: Any  # [TABLE_SLOTS]
    write_sems: Any  # [WRITE_SLOTS]
    block_sems: Any  # [slots]
    query_sems: Any  # [slots]
    out_sems: Any  # [2]


def scratch_shapes(spec: KernelSpec, table_parts: int) -> Scratch:
    layout, sizes = spec.layout, spec.sizes
    state = (1 if spec.decode_only else sizes.query_tile) * spec.group

    def query_buffers(slots: int, tile: int) -> QueryBuffers:
        shape = (spec.query_heads, tile, spec.group // spec.query_packing, spec.query_packing, LANES)
        return QueryBuffers(*(pltpu.VMEM((count, *shape), spec.compute_dtype) for count in (slots, 2)))

    dma = pltpu.SemaphoreType.DMA
    decode = query_buffers(sizes.slots, 1)
    return Scratch(
        table=pltpu.SMEM((TABLE_SLOTS, table_parts, 1, LANES), jnp.int32),
        blocks=pltpu.VMEM((sizes.slots, sizes.block, layout.word_rows, 1, LANES), jnp.uint32),
        maximum=pltpu.VMEM((layout.num_kv_heads, state, LANES), jnp.float32),
        total=pltpu.VMEM((layout.num_kv_heads, state, LANES), jnp.float32),
        weighted=pltpu.VMEM((spec.query_heads, state, LANES), jnp.float32),
        decode=decode,
        mixed=decode if spec.decode_only else query_buffers(MIXED_SLOTS, sizes.query_tile),
        table_sems=dma((TABLE_SLOTS,)),
        write_sems=dma((WRITE_SLOTS,)),
        block_sems=dma((sizes.slots,)),
        query_sems=dma((sizes.slots,)),
        out_sems=dma((2,)),
    )


def div(a: Scalar, b: Scalar) -> Any:
    """a // b of non-negative numbers: `//` on traced ones rounds negative quotients too, at a price."""
    return lax.div(jnp.int32(a), jnp.int32(b))


def rem(a: Scalar, b: Scalar) -> Any:
    return lax.rem(jnp.int32(a), jnp.int32(b))


def ceil_div(a: Scalar, b: Scalar) -> Any:
    return div(a + b - 1, b)
