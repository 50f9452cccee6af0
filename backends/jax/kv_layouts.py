"""BlockLayout: one block of a KV cache as each attention implementation keeps it, to and from the order of tokens.

The order of tokens is that of engine.kv_blocks, [layers, 2 (key, value), kv_heads, block_size, head_dim], in the
unsigned integers of the dtype's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax import native
from backends.jax.attention import LibraryAttention, NativeAttention, PagedAttention, PallasAttention, XlaAttention

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class BlockLayout(ABC):
    """A block of one chip: its slice of the cache without the axis of blocks."""

    attention: PagedAttention

    @property
    def unsigned(self) -> np.dtype[Any]:
        return np.dtype(_UNSIGNED[jnp.dtype(self.attention.dtype).itemsize])

    @property
    def token_order(self) -> tuple[int, int, int, int, int]:
        """Shape of a block in the order of tokens."""
        a = self.attention
        return a.num_layers, 2, a.num_kv_heads, a.block_size, a.head_dim

    @abstractmethod
    def read(self, cache: jax.Array, ids: jax.Array, count: jax.Array) -> jax.Array:
        """The first `count` of blocks `ids` [n] in the order of tokens, [layers, 2, kv_heads, n * block_size, d].

        What is behind them may be anything.
        """

    @abstractmethod
    def write(self, cache: jax.Array, data: jax.Array, ids: jax.Array, count: jax.Array, kept: jax.Array) -> jax.Array:
        """Writes data [layers, 2, kv_heads, n * block_size, d] into the first `count` of blocks `ids` [n].

        The first `kept` tokens of the first block stay as they are.
        """

    def _bits(self, x: jax.Array) -> jax.Array:
        return x if x.dtype == self.unsigned else jax.lax.bitcast_convert_type(x, self.unsigned)

    def _values(self, bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(self.attention.dtype))


class BlockwiseLayout(BlockLayout):
    """Moves one block after the other, with all its layers."""

    @abstractmethod
    def unpack(self, block: jax.Array) -> jax.Array:
        """A block as it is kept -> in the order of tokens."""

    @abstractmethod
    def pack(self, tokens: jax.Array) -> jax.Array:
        """A block in the order of tokens -> as it is kept."""

    def read(self, cache: jax.Array, ids: jax.Array, count: jax.Array) -> jax.Array:
        layers, two, heads, size, d = self.token_order

        def one(index: jax.Array, out: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_index_in_dim(cache, ids[index], axis=1, keepdims=False)
            longer: jax.Array = jax.lax.dynamic_update_slice_in_dim(out, self.unpack(block), index * size, axis=3)
            return longer

        nothing = jnp.zeros((layers, two, heads, ids.shape[0] * size, d), self.unsigned)
        out: jax.Array = jax.lax.fori_loop(0, count, one, nothing)
        return out

    def write(self, cache: jax.Array, data: jax.Array, ids: jax.Array, count: jax.Array, kept: jax.Array) -> jax.Array:
        size = self.token_order[3]

        def one(index: jax.Array, cache: jax.Array) -> jax.Array:
            block = self.pack(jax.lax.dynamic_slice_in_dim(data, index * size, size, axis=3))
            updated: jax.Array = jax.lax.dynamic_update_index_in_dim(cache, block, ids[index], axis=1)
            return updated

        old = self.unpack(jax.lax.dynamic_index_in_dim(cache, ids[0], axis=1, keepdims=False))
        stays = (jnp.arange(size) < kept)[:, None]
        first = self.pack(jnp.where(stays, old, data[:, :, :, :size]))
        cache = jax.lax.dynamic_update_index_in_dim(cache, first, ids[0], axis=1)
        out: jax.Array = jax.lax.fori_loop(1, count, one, cache)
        return out


class XlaLayout(BlockwiseLayout):
    """[layers, 2, kv_heads, block_size, d]: the order of tokens."""

    def unpack(self, block: jax.Array) -> jax.Array:
        return self._bits(block)

    def pack(self, tokens: jax.Array) -> jax.Array:
        kept = self.attention.cache_shape(0).dtype
        return tokens if tokens.dtype == kept else jax.lax.bitcast_convert_type(tokens, kept)


class NativeLayout(BlockLayout):
    """In tiles of the native kernel, which C++ puts in order, too (native/kv_exchange.h)."""

    def read(self, cache: jax.Array, ids: jax.Array, count: jax.Array) -> jax.Array:
        return self._bits(native.read_blocks(cache, ids, count.reshape(1), self.attention.head_dim))

    def write(self, cache: jax.Array, data: jax.Array, ids: jax.Array, count: jax.Array, kept: jax.Array) -> jax.Array:
        values = data if cache.dtype == data.dtype else jax.lax.bitcast_convert_type(data, cache.dtype)
        return native.write_blocks(cache, values, ids, count.reshape(1), kept.reshape(1))


class PallasLayout(BlockwiseLayout):
    """[layers, block_size, R, 1, 128] words (attention/pallas/words.py)."""

    def unpack(self, block: jax.Array) -> jax.Array:
        assert isinstance(self.attention, PallasAttention)
        keys, values = self.attention.layout.unpack(block)  # [layers, block_size, kv_heads, d]
        return self._bits(jnp.stack([keys, values], axis=1)).swapaxes(2, 3)

    def pack(self, tokens: jax.Array) -> jax.Array:
        assert isinstance(self.attention, PallasAttention)
        layers, _, heads, size, d = self.token_order
        keys, values = (x.swapaxes(1, 2).reshape(-1, heads, d) for x in (tokens[:, 0], tokens[:, 1]))
        words = self.attention.layout.pack(self._values(keys), self._values(values))
        return words.reshape(layers, size, *words.shape[1:])


class LibraryLayout(BlockwiseLayout):
    """[layers, block_size, 2 kv_heads, d] of the cache's own type, K and V of the heads interleaved."""

    def unpack(self, block: jax.Array) -> jax.Array:
        layers, _, heads, size, d = self.token_order
        return self._bits(block).reshape(layers, size, heads, 2, d).transpose(0, 3, 2, 1, 4)

    def pack(self, tokens: jax.Array) -> jax.Array:
        layers, _, heads, size, d = self.token_order
        return self._values(tokens.transpose(0, 3, 2, 1, 4).reshape(layers, size, 2 * heads, d))


_LAYOUTS: dict[type[PagedAttention], type[BlockLayout]] = {
    NativeAttention: NativeLayout,
    XlaAttention: XlaLayout,
    PallasAttention: PallasLayout,
    LibraryAttention: LibraryLayout,
}


def block_layout(attention: PagedAttention) -> BlockLayout:
    return _LAYOUTS[type(attention)](attention)
