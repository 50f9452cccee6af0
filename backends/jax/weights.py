"""Weight leaves: how a matrix is stored, and the one `linear` that understands every storage.

A leaf is a pytree node with a `data` array. Layers' leaves carry a leading layer axis and `at_layer` picks one without
copying where the storage allows it. Quantized storage joins here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import jax
import jax.numpy as jnp

from backends.jax import native


class Weight(Protocol):
    """A matrix [out, in], or a stack of them."""

    def at_layer(self, layer: jax.Array) -> Self: ...

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """x [t, in] float32 -> [t, out] float32; rows from num_tokens [1] on may be anything finite."""
        ...

    def take_rows(self, ids: jax.Array) -> jax.Array:
        """Rows `ids` [t] of the matrix (an embedding), [t, in] float32."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DenseWeight:
    """The matrix as it is, [(layers,) out, in], multiplied by XLA."""

    data: jax.Array

    def at_layer(self, layer: jax.Array) -> DenseWeight:
        return DenseWeight(data=jax.lax.dynamic_index_in_dim(self.data, layer, keepdims=False))

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        # [out, in] contracted last with last, and a float32 result, is what XLA's CPU and TPU products do best.
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x.astype(self.data.dtype), self.data, dimensions, preferred_element_type=jnp.float32)

    def take_rows(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.data, ids, axis=0).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """The native CPU kernel's order, [layers, blocks, in / pair, 32, pair]; uint16 holds bfloat16."""

    data: jax.Array
    layer: jax.Array  # which of the layers; int32 scalar
    out_features: int = field(metadata={"static": True})

    def at_layer(self, layer: jax.Array) -> PackedWeight:
        return replace(self, layer=layer)

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        return native.linear(x, self.data, self.layer, num_tokens, self.out_features)

    def take_rows(self, ids: jax.Array) -> jax.Array:
        rows = self.data[0, ids // native.BLOCK, :, ids % native.BLOCK, :].reshape(ids.shape[0], -1)
        if rows.dtype == jnp.uint16:
            rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
        return rows.astype(jnp.float32)
