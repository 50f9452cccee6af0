"""PallasAttention: what surrounds the kernel's call. Rotation and the layout of queries and new keys stay with XLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention.base import (
    NO_LIMIT,
    NOTHING_MORE,
    AttentionInputs,
    LayerArrays,
    PagedAttention,
    quantized,
)
from backends.jax.attention.pallas.refs import KernelSpec, Scalars, scratch_shapes
from backends.jax.attention.pallas.tiling import BlockSizes, QueryTiles, block_sizes
from backends.jax.attention.pallas.walk import Kernel
from backends.jax.attention.pallas.words import LANES, WORD_ROW_BYTES, WordLayout
from backends.jax.rope import Rotary

VMEM_LIMIT_BYTES = 15 << 20
"""Below the smallest chip's VMEM (v4: 16 MiB); the block sizes keep buffers and state within 12 MiB."""
MAX_BLOCKS = 1 << 15
"""Of a row: the ring of block tables takes 640 KiB of SMEM, which has 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class PallasAttention(PagedAttention):
    sizes: BlockSizes | None = None  # None = by tiling's rule
    interpret: Any = False  # pltpu.InterpretParams: simulate the kernel on CPU (tests)

    def problem(self) -> str | None:
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} query heads can't share {self.num_kv_heads} kv heads evenly"
        if self.head_dim > 256:
            return f"the TPU kernel takes heads of up to 256 elements, not {self.head_dim}"
        if self.block_size & (self.block_size - 1) or self.block_size < 8:
            return f"the TPU kernel takes blocks of a power of two of 8 tokens or more, not {self.block_size}"
        return None

    @property
    def layout(self) -> WordLayout:
        return WordLayout(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype)

    def cache_shape(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        shape = (self.num_layers, num_blocks + 1, self.block_size, self.layout.word_rows, 1, LANES)
        return jax.ShapeDtypeStruct(shape, jnp.uint32)

    def spec(self, decode_only: bool, has_sinks: bool) -> KernelSpec:
        packing = 1 if self.dtype == "float32" else 2
        group = -(-self.num_heads // self.num_kv_heads // packing) * packing
        return KernelSpec(
            layout=self.layout,
            sizes=self.sizes or block_sizes(self.layout, group, self.block_size),
            group=group,
            block_size=self.block_size,
            soft_cap=self.soft_cap,
            has_sinks=has_sinks,
            decode_only=decode_only,
            interpret=bool(self.interpret),
        )

    def __call__(
        self,
        qkv: jax.Array,
        rotary: Rotary,
        cache: jax.Array,
        layer: jax.Array,
        inputs: AttentionInputs,
        extra: LayerArrays = NOTHING_MORE,
    ) -> tuple[jax.Array, jax.Array]:
        blocks = inputs.block_tables.shape[1]
        if blocks > MAX_BLOCKS:
            raise ValueError(f"rows of {blocks} blocks are too long for the TPU kernel; use a larger block_size")
        spec = self.spec(inputs.decode_only, extra.sinks is not None)
        q, k, v = self._rotated(qkv, rotary)
        new = spec.layout.pack(quantized(k, extra.k_scale, self.dtype), quantized(v, extra.v_scale, self.dtype))
        queries = self._lay_out_queries(q, extra, spec)
        tables = _in_lanes(inputs.block_tables)
        scalars = self._scalars(layer, inputs, extra, spec)
        out, cache = self._call(spec, scalars, (queries, new, tables, cache))
        return self._heads(out, extra, spec).astype(qkv.dtype), cache

    def _lay_out_queries(self, q: jax.Array, extra: LayerArrays, spec: KernelSpec) -> jax.Array:
        """[T, heads, d] -> [T, kv_heads * chunks, group / packing, packing, 128], times the scales of logits."""
        tokens, kv_heads, chunks, packing = q.shape[0], self.num_kv_heads, spec.layout.chunks, spec.query_packing
        q = q.reshape(tokens, kv_heads, -1, self.head_dim) * self.scale
        if extra.k_scale is not None:
            q = q * extra.k_scale[:, None, None]
        missing = (spec.group - q.shape[2], chunks * LANES - self.head_dim)
        q = jnp.pad(q.astype(spec.compute_dtype), ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))
        if chunks > 1:
            q = q.reshape(tokens, kv_heads, spec.group, chunks, LANES).swapaxes(2, 3)
        return q.reshape(tokens, kv_heads * chunks, spec.group // packing, packing, LANES)

    def _heads(self, out: jax.Array, extra: LayerArrays, spec: KernelSpec) -> jax.Array:
        """What the kernel gives -> [T, heads, d] float32."""
        tokens, kv_heads, chunks = out.shape[0], self.num_kv_heads, spec.layout.chunks
        out = out.reshape(tokens, kv_heads, chunks, spec.group, LANES).swapaxes(2, 3)
        out = out[:, :, : self.num_heads // kv_heads].reshape(tokens, kv_heads, -1, chunks * LANES)
        first = LANES // 2 if spec.layout.side_by_side else 0
        out = out[..., first : first + self.head_dim].astype(jnp.float32)
        if extra.v_scale is not None:
            out = out * extra.v_scale[:, None, None]
        return out.reshape(tokens, self.num_heads, self.head_dim)

    def _scalars(self, layer: jax.Array, inputs: AttentionInputs, extra: LayerArrays, spec: KernelSpec) -> Scalars:
        tiles = QueryTiles.of(inputs, spec.sizes.query_tile)
        limits = jnp.minimum(jnp.stack([jnp.int32(self.window_of(extra)), jnp.int32(self.chunk_of(extra))]), NO_LIMIT)
        sinks = jnp.zeros((1, 1), jnp.float32) if extra.sinks is None else extra.sinks.astype(jnp.float32)
        sinks = sinks.reshape(-1, sinks.size if extra.sinks is None else self.num_heads // self.num_kv_heads)
        return Scalars(
            layer=layer.reshape(1),
            limits=limits,
            counts=jnp.stack([tiles.num_decode, tiles.num_tiles]),
            kv_lens=inputs.kv_lens,
            query_starts=inputs.query_starts,
            tile_rows=tiles.rows,
            tile_starts=tiles.starts,
            sinks=jnp.pad(sinks, ((0, 0), (0, spec.group - sinks.shape[1]))).reshape(-1),
        )

    def _call(self, spec: KernelSpec, scalars: Scalars, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        queries, _, tables, cache = arrays
        anywhere, hbm = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)
        out, cache = pl.pallas_call(
            Kernel(spec),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=(),
                in_specs=[anywhere, anywhere, hbm, hbm],
                out_specs=[anywhere, hbm],
                scratch_shapes=scratch_shapes(spec, tables.shape[1]),
            ),
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (queries, cache)],
            input_output_aliases={len(scalars): 0, len(scalars) + 3: 1},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
            cost_estimate=self._cost(spec, queries, tables, cache),
            interpret=self.interpret,
            name="ragged_paged_attention",
        )(*scalars, *arrays)
        return out, cache

    def _cost(self, spec: KernelSpec, queries: jax.Array, tables: jax.Array, cache: jax.Array) -> pl.CostEstimate:
        """The worst case of these shapes: every row at full width; decoding, no more than the cache holds."""
        tokens, rows = queries.shape[0], tables.shape[0]
        context = tables.shape[1] * LANES * self.block_size
        tiles = rows if spec.decode_only else -(-tokens // spec.sizes.query_tile) + rows
        context = min(context, self.window or context, self.chunk or context)
        keys = tiles * context
        if spec.decode_only:  # nothing but shared prefixes is read twice
            keys = min(keys, cache.shape[1] * self.block_size)
        pairs = keys if spec.decode_only else keys * spec.sizes.query_tile
        token_bytes = spec.layout.word_rows * WORD_ROW_BYTES
        return pl.CostEstimate(
            flops=4 * pairs * self.num_heads * self.head_dim,
            transcendentals=pairs * self.num_heads,
            bytes_accessed=(keys + 2 * tokens) * token_bytes + 2 * queries.size * queries.dtype.itemsize,
        )


def _in_lanes(tables: jax.Array) -> jax.Array:
    """[R, B] -> [R, C, 1, 128]: rows whose parts a DMA can move."""
    rows, width = tables.shape
    return jnp.pad(tables, ((0, 0), (0, -width % LANES))).reshape(rows, -1, 1, LANES)
