"""The numbers of the TPU kernel: softmax over blocks of keys as they come (flash attention), head by head.

Queries come multiplied with the scale of logits (and of quantized keys), so that scores need none; the scale of
quantized values is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from backends.jax.attention.pallas.lanes import LaneAccess
from backends.jax.attention.pallas.refs import KernelSpec, Limits, Scalar, Scratch
from backends.jax.attention.pallas.words import LANES

HIDDEN = -1e30
"""The score of a key that a query doesn't see: its weight vanishes against any key that it does."""
HEADS_AT_ONCE = 4
"""Heads of a decoding row whose instructions the compiler can interleave. The rest is a loop, as are the heads of
prompts, whose tiles have enough to interleave: that keeps programs small."""


@dataclass(frozen=True, kw_only=True)
class Flash:
    """A tile's running softmax, in scratch memory."""

    spec: KernelSpec
    sinks: Any  # [heads] float32 in SMEM
    limits: Limits
    scratch: Scratch
    query_tile: int

    @property
    def rows(self) -> int:
        """Query rows of a head: tokens times the query heads that share a kv head."""
        return self.query_tile * self.spec.group

    @cached_property
    def lanes(self) -> LaneAccess:
        return LaneAccess(interpret=self.spec.interpret)

    @property
    def _heads_at_once(self) -> int:
        """A divisor of the kv heads whose lane rows are whole words; else all heads."""
        layout = self.spec.layout
        most, heads = layout.num_kv_heads, range(1, layout.num_kv_heads + 1)
        whole = [n for n in heads if most % n == 0 and n * layout.rows_per_head % layout.packing == 0] or [most]
        return whole[0] if self.query_tile > 1 else max([n for n in whole if n <= HEADS_AT_ONCE], default=whole[0])

    def _for_each(self, action: Callable[[Scalar], None], count: int) -> None:
        lax.fori_loop(0, count, lambda index, _: action(index), None)

    def begin(self) -> None:
        scratch, rows = self.scratch, self.rows
        zeros = jnp.zeros((rows, LANES), jnp.float32)

        def one_head(head: Scalar) -> None:
            scratch.maximum[head, :rows] = self._sink(head) if self.spec.has_sinks else zeros + HIDDEN
            scratch.total[head, :rows] = zeros + 1 if self.spec.has_sinks else zeros
            for chunk in range(self.spec.layout.chunks):
                scratch.weighted[head * self.spec.layout.chunks + chunk, :rows] = zeros

        self._for_each(one_head, self.spec.layout.num_kv_heads)

    def _sink(self, head: Scalar) -> jax.Array:
        """[rows, 128]: each query row's sink."""
        shape = (self.rows, LANES)
        member = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(self.spec.group))
        sink = jnp.zeros(shape, jnp.float32)
        for index in range(self.spec.group):
            sink = jnp.where(member == index, self.sinks[head * self.spec.group + index], sink)
        return sink

    def attend(self, queries: Any, block: Any, first: Scalar, begin: Scalar) -> None:
        """Takes a block of keys in.

        Args:
            queries: reference [query_heads, query_tile, group / packing, packing, 128].
            block: reference [tokens, R, 1, 128] to words.
            first: position of the first query token.
            begin: position of the block's first key.
        """
        sizes = self.spec.sizes
        step = sizes.block if self.query_tile == 1 else sizes.part

        def one_part(part: Scalar) -> None:
            seen = self._seen(first, begin + part * step, step)
            self._attend_part(queries, block.at[pl.ds(part * step, step)], seen)

        self._for_each(one_part, sizes.block // step)

    def _seen(self, first: Scalar, begin: Scalar, keys: int) -> jax.Array:
        """[rows, keys]: which keys, from position `begin` on, each query row sees."""
        key = begin + lax.broadcasted_iota(jnp.int32, (self.rows, keys), 1)
        if self.query_tile == 1:
            seen: jax.Array = (key >= self.limits.oldest(first)) & (key <= first)
        else:
            token = lax.div(lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0), jnp.int32(self.spec.group))
            position = first + token
            # Whole chunks between the first query's chunk and each query's: small numbers, exact in float32.
            chunk_start, chunk = self.limits.chunk_start(first), self.limits.chunk
            inside = (position - chunk_start).astype(jnp.float32) + 0.5
            chunks = jnp.floor(inside / lax.convert_element_type(chunk, jnp.float32)).astype(jnp.int32)
            oldest = jnp.maximum(position - self.limits.window + 1, chunk_start + chunks * chunk)
            seen = (key >= oldest) & (key <= position)
        return seen

    def _attend_part(self, queries: Any, block: Any, seen: jax.Array) -> None:
        layout, at_once = self.spec.layout, self._heads_at_once

        def some_heads(turn: Scalar) -> None:
            words = turn * (at_once * layout.rows_per_head // layout.packing)
            rows: list[jax.Array] = []
            for word_row in range(-(-at_once * layout.rows_per_head // layout.packing)):
                rows += self.lanes.unpack(layout, block, words + word_row)
            for index in range(at_once):
                keys = [rows[layout.key_row(index, chunk)] for chunk in range(layout.chunks)]
                values = [rows[layout.value_row(index, chunk)] for chunk in range(layout.chunks)]
                head = turn * at_once + index
                self._accumulate(head, self._scores(queries, head, keys, seen), values)

        self._for_each(some_heads, layout.num_kv_heads // at_once)

    def _scores(self, queries: Any, head: Scalar, keys: list[jax.Array], seen: jax.Array) -> jax.Array:
        scores = jnp.zeros(seen.shape, jnp.float32)
        for chunk, key in enumerate(keys):
            query = self.lanes.read_packed(queries.at[head * len(keys) + chunk])
            product = self._product(query, key, key_axis=1)
            scores = scores + product if chunk else product
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * jnp.tanh(scores / self.spec.soft_cap)
        return jnp.where(seen, scores, HIDDEN)

    def _accumulate(self, head: Scalar, scores: jax.Array, values: list[jax.Array]) -> None:
        scratch, rows = self.scratch, self.rows
        before = scratch.maximum[head, :rows]
        after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - after[:, :1])
        shrink = jnp.exp(before - after)
        scratch.maximum[head, :rows] = after
        scratch.total[head, :rows] = shrink * scratch.total[head, :rows] + jnp.sum(weights, axis=1, keepdims=True)
        for chunk, value in enumerate(values):
            at = head * len(values) + chunk
            product = self._product(weights.astype(self.spec.compute_dtype), value, key_axis=0)
            scratch.weighted[at, :rows] = shrink * scratch.weighted[at, :rows] + product

    def finish(self, out: Any) -> None:
        """Writes the outputs to a reference like attend's queries."""
        scratch, chunks = self.scratch, self.spec.layout.chunks

        def one_head(head: Scalar) -> None:
            total = scratch.total[head, : self.rows]
            for chunk in range(chunks):
                at = head * chunks + chunk
                result = scratch.weighted[at, : self.rows] / total
                self.lanes.write_packed(out.at[at], result.astype(self.spec.compute_dtype))

        self._for_each(one_head, self.spec.layout.num_kv_heads)

    def _product(self, a: jax.Array, b: jax.Array, *, key_axis: int) -> jax.Array:
        exact = self.spec.compute_dtype == jnp.float32
        return lax.dot_general(
            a,
            b,
            (((1,), (key_axis,)), ((), ())),
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
