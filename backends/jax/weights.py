"""Weight leaves: how a matrix is stored, and the one `linear` that understands every storage.

A leaf is a pytree node with a `data` array. Layers' leaves carry a leading layer axis and `at_layer` picks one without
copying where the storage allows it.
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
        return _product(x, self.data)

    def take_rows(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.data, ids, axis=0).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """int8 [(layers,) out, in] with float32 scales [(layers,) out], multiplied by XLA.

    TPU's compiler is seen to read the layer's int8 in place, convert it tile by tile in front of the matrix unit and
    scale what comes out, in one fusion: no converted copy, no sliced copy (tests/backends/jax/test_int8_on_tpu.py).
    """

    data: jax.Array
    scale: jax.Array
    dtype: str = field(metadata={"static": True})
    """Type of the factors, "bfloat16" or "float32"; int8 is exact in both. Sums are float32."""

    def at_layer(self, layer: jax.Array) -> QuantizedWeight:
        data, scale = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (self.data, self.scale))
        return replace(self, data=data, scale=scale)

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        return _product(x, self.data.astype(self.dtype)) * self.scale

    def take_rows(self, ids: jax.Array) -> jax.Array:
        rows = jnp.take(self.data, ids, axis=0).astype(jnp.float32)
        return rows * jnp.take(self.scale, ids, axis=0)[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """The native CPU kernel's order, [layers, blocks, in / pair, 32, pair]; uint16 holds bfloat16."""

    data: jax.Array
    layer: jax.Array | None = None  # which of the layers, int32 scalar; None: the first
    out_features: int = field(metadata={"static": True})

    def at_layer(self, layer: jax.Array) -> PackedWeight:
        return replace(self, layer=layer)

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        layer = jnp.int32(0) if self.layer is None else self.layer
        return native.linear(x, self.data, layer, num_tokens, self.out_features)

    def take_rows(self, ids: jax.Array) -> jax.Array:
        rows = self.data[0, ids // native.BLOCK, :, ids % native.BLOCK, :].reshape(ids.shape[0], -1)
        if rows.dtype == jnp.uint16:
            rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
        return rows.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedInt8Weight:
    """Likewise in int8, [layers, blocks, in / 2, 32, 2], with float32 scales [layers, blocks, 32]."""

    data: jax.Array
    scale: jax.Array
    layer: jax.Array | None = None  # which of the layers, int32 scalar; None: the first
    out_features: int = field(metadata={"static": True})
    exact: bool = field(metadata={"static": True})
    """Multiply float32 activations as they are; else they may be rounded to 16 bits, which is faster."""

    def at_layer(self, layer: jax.Array) -> PackedInt8Weight:
        return replace(self, layer=layer)

    def linear(self, x: jax.Array, num_tokens: jax.Array) -> jax.Array:
        layer = jnp.int32(0) if self.layer is None else self.layer
        return native.linear_int8(
            x, self.data, self.scale, layer, num_tokens, out_features=self.out_features, exact=self.exact
        )

    def take_rows(self, ids: jax.Array) -> jax.Array:
        block, place = ids // native.BLOCK, ids % native.BLOCK
        rows = self.data[0, block, :, place, :].reshape(ids.shape[0], -1).astype(jnp.float32)
        return rows * self.scale[0, block, place][:, None]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [t, in] times matrix [out, in] in the matrix' type, summed up in float32."""
    # Contracted last with last, and a float32 result, is what XLA's CPU and TPU products do best.
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x.astype(matrix.dtype), matrix, dimensions, preferred_element_type=jnp.float32)
