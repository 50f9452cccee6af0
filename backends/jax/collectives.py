"""Collectives: what crosses the chips of a tensor-parallel group inside a step. The model calls it and knows no more.

The step runs as one shard_map, so all other code sees a chip's own part of everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from backends.jax.sharding import MODEL
from backends.jax.weights import Weight

Rows = TypeVar("Rows")
"""A tree of arrays [R, …]."""


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """One chip: nothing crosses anything."""

    vocab_per_chip: int
    chips: int = 1

    def combine(self, partial: jax.Array) -> jax.Array:
        """Adds up what the chips computed for [T, hidden], each from its part of the features."""
        return partial

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """[T, hidden] of all tokens, if `combine` left each chip with some of them."""
        return x

    def take_rows(self, embedding: Weight, ids: jax.Array) -> jax.Array:
        """Rows `ids` [T] of an embedding whose vocabulary is cut over the chips."""
        return embedding.take_rows(ids)

    def whole_rows(self, logits: jax.Array) -> jax.Array:
        """[R, vocab_per_chip] -> [R / chips, vocab, padded]: each chip gets whole rows of its share of the rows."""
        return logits

    def own_rows(self, rows: Rows) -> Rows:
        """This chip's share of rows, the ones that `whole_rows` gives it."""
        return rows

    def gather_rows(self, rows: Rows) -> Rows:
        """All rows from every chip's share."""
        return rows

    def local_rows(self, num_rows: jax.Array, rows: int) -> jax.Array:  # noqa: ARG002
        """How many of a chip's `rows` are valid, if num_rows [1] of all are."""
        return num_rows

    def greedy(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """The first of the largest of logits [R, vocab_per_chip] over all chips; int32 [R]."""
        return jnp.argmax(logits[:, :vocab_size], axis=-1).astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class MeshCollectives(Collectives):
    """Several chips along the mesh's model axis."""

    def combine(self, partial: jax.Array) -> jax.Array:
        total: jax.Array = jax.lax.psum(partial, MODEL)
        return total

    def take_rows(self, embedding: Weight, ids: jax.Array) -> jax.Array:
        local = ids - self._first_id()
        inside = (local >= 0) & (local < self.vocab_per_chip)
        rows = embedding.take_rows(jnp.where(inside, local, 0))
        return self.combine(jnp.where(inside[:, None], rows, 0))

    def whole_rows(self, logits: jax.Array) -> jax.Array:
        dealt: jax.Array = jax.lax.all_to_all(self._padded(logits), MODEL, split_axis=0, concat_axis=1, tiled=True)
        return dealt

    def own_rows(self, rows: Rows) -> Rows:
        def own(x: jax.Array) -> jax.Array:
            size = -(-x.shape[0] // self.chips)
            return jax.lax.dynamic_slice_in_dim(self._padded(x), jax.lax.axis_index(MODEL) * size, size)

        result: Rows = jax.tree.map(own, rows)
        return result

    def gather_rows(self, rows: Rows) -> Rows:
        result: Rows = jax.tree.map(lambda x: jax.lax.all_gather(x, MODEL, tiled=True), rows)
        return result

    def local_rows(self, num_rows: jax.Array, rows: int) -> jax.Array:
        return jnp.clip(num_rows - jax.lax.axis_index(MODEL) * rows, 0, rows)

    def greedy(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        ids = self._first_id() + jnp.arange(self.vocab_per_chip)
        masked = jnp.where(ids < vocab_size, logits, -jnp.inf)
        best = jnp.argmax(masked, axis=-1)
        values = jax.lax.all_gather(jnp.max(masked, axis=-1), MODEL)  # [chips, R]
        each = jax.lax.all_gather(ids[best], MODEL)
        chip = jnp.argmax(values, axis=0)  # the first of equals, as on one chip
        return jnp.take_along_axis(each, chip[None], axis=0)[0].astype(jnp.int32)

    def _first_id(self) -> jax.Array:
        return jax.lax.axis_index(MODEL) * self.vocab_per_chip

    def _padded(self, x: jax.Array) -> jax.Array:
        """Rows up to a multiple of the chips."""
        return jnp.pad(x, ((0, -x.shape[0] % self.chips), *[(0, 0)] * (x.ndim - 1)))


@dataclass(frozen=True, kw_only=True)
class SequenceCollectives(MeshCollectives):
    """Several chips, each with its share of the tokens between projections (Korthikanti et al. 2022).

    An all-reduce is a reduce-scatter and an all-gather: with norms and residuals between the two, as many bytes cross
    the links, but each chip reads and writes its share of the residual stream only. T is a multiple of the chips.
    """

    def combine(self, partial: jax.Array) -> jax.Array:
        share: jax.Array = jax.lax.psum_scatter(partial, MODEL, scatter_dimension=0, tiled=True)
        return share

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        whole: jax.Array = jax.lax.all_gather(x, MODEL, tiled=True)
        return whole
