"""Rows of 128 lanes out of buffers in which tokens and heads are apart, unpacked into what is multiplied.

Interpret mode can't reshape references; it reshapes what it has read instead. That is the only difference between what
tests run on CPU and what runs on TPU, and it is confined to LaneAccess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from backends.jax.attention.pallas.refs import Scalar
from backends.jax.attention.pallas.words import LANES, WordLayout

LOW_HALF, HIGH_HALF = 0xFFFF, 0xFFFF0000


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneAccess:
    """Reads and writes references [..., 128] as if they were [rows, 128]."""

    interpret: bool

    def read(self, ref: Any, first: Scalar = 0, stride: int = 1) -> jax.Array:
        """Every stride-th row of 32-bit elements, beginning with row `first` < stride; rows divide by stride."""
        rows = math.prod(ref.shape) // LANES
        if self.interpret:
            strided = ref[...].reshape(rows // stride, stride, LANES)
            found: jax.Array = lax.dynamic_index_in_dim(strided, first, axis=1, keepdims=False)
        elif stride == 1:
            found = ref.reshape(rows, LANES)[...]
        else:
            found = ref.reshape(rows, LANES)[pl.ds(first, rows // stride, stride), :]
        return found

    def write(self, ref: Any, value: jax.Array) -> None:
        if self.interpret:
            ref[...] = value.reshape(ref.shape)
        else:
            ref.reshape(*value.shape)[...] = value

    def read_packed(self, ref: Any) -> jax.Array:
        """All rows of float32 or bfloat16; bfloat16 rows lie in pairs [..., 2, 128]."""
        if ref.dtype == jnp.float32:
            return self.read(ref)
        if self.interpret:
            rows: jax.Array = ref[...].reshape(-1, LANES)
            return rows
        return pltpu.bitcast(self.read(ref.bitcast(jnp.uint32)), jnp.bfloat16)

    def write_packed(self, ref: Any, value: jax.Array) -> None:
        if ref.dtype == jnp.float32 or self.interpret:
            self.write(ref, value)
        else:
            self.write(ref.bitcast(jnp.uint32), pltpu.bitcast(value, jnp.uint32))

    def unpack(self, layout: WordLayout, block: Any, word_row: Scalar) -> list[jax.Array]:
        """The lane rows in one word row of all tokens of a block [tokens, R, 1, 128]; each [tokens, 128]."""
        rows = layout.word_rows
        if layout.packing == 1:
            return [pltpu.bitcast(self.read(block, word_row, rows), jnp.float32)]
        if layout.packing == 2:
            # Halves of even and odd tokens' words change places: half the work of a way through float32.
            even = self.read(block, word_row, 2 * rows)
            odd = self.read(block, word_row + rows, 2 * rows)
            low = (even & jnp.uint32(LOW_HALF)) | (odd << 16)
            high = (even >> 16) | (odd & jnp.uint32(HIGH_HALF))
            return [pltpu.bitcast(low, jnp.bfloat16), pltpu.bitcast(high, jnp.bfloat16)]
        words = self.read(block, word_row, rows)
        convert = int8_at if layout.dtype == "int8" else float8_at
        return [convert(words, part).astype(jnp.bfloat16) for part in range(4)]


def int8_at(words: jax.Array, part: int) -> jax.Array:
    """Byte `part` of each word as float32."""
    signed = pltpu.bitcast(words << (24 - 8 * part), jnp.int32) >> 24
    return signed.astype(jnp.float32)


def float8_at(words: jax.Array, part: int) -> jax.Array:
    """Byte `part` of each word, an e4m3fn number (only finite ones are stored), as float32."""
    byte = words >> (8 * part)
    magnitude = (byte & jnp.uint32(0x7F)) << 20  # exponent and mantissa where float32 has them
    normal = pltpu.bitcast(magnitude + jnp.uint32(120 << 23), jnp.float32)
    # Exponent 0 has no hidden one: taken for 2^-7 (1 + m / 8), it is 2^-6 m / 8.
    value = jnp.where(magnitude < jnp.uint32(1 << 23), 2 * normal - 2**-6, normal)
    sign = (byte & jnp.uint32(0x80)) << 24
    return pltpu.bitcast(pltpu.bitcast(value, jnp.uint32) | sign, jnp.float32)
