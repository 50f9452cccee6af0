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

from backends.jax.attention import LibraryAttention, NativeAttention, PagedAttention, PallasAttention, XlaAttention

NATIVE_TILE = 32  # tokens (kMaxTile in native/attention.h)
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
    def unpack(self, block: jax.Array) -> jax.Array:
        """A block as it is kept -> in the order of tokens."""

    @abstractmethod
    def pack(self, tokens: jax.Array) -> jax.Array:
        """A block in the order of tokens -> as it is kept."""

    def _bits(self, x: jax.Array) -> jax.Array:
        return x if x.dtype == self.unsigned else jax.lax.bitcast_convert_type(x, self.unsigned)

    def _values(self, bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(self.attention.dtype))


class XlaLayout(BlockLayout):
    """[layers, 2, kv_heads, block_size, d]: the order of tokens."""

    def unpack(self, block: jax.Array) -> jax.Array:
        return self._bits(block)

    def pack(self, tokens: jax.Array) -> jax.Array:
        kept = self.attention.cache_shape(0).dtype
        return tokens if tokens.dtype == kept else jax.lax.bitcast_convert_type(tokens, kept)


class NativeLayout(BlockLayout):
    """[layers, 2, kv_heads, block_size * d], in tiles of up to 32 tokens: keys as [d / pair, tile, pair], values as
    [tile / pair, d, pair]; bfloat16 come in pairs."""

    @property
    def _tiles(self) -> tuple[int, int, int]:
        """Tiles, tokens of one, elements of a pair."""
        tile = min(NATIVE_TILE, self.attention.block_size)
        return self.attention.block_size // tile, tile, 1 if self.attention.dtype == "float32" else 2

    def unpack(self, block: jax.Array) -> jax.Array:
        layers, _, heads, _, d = self.token_order
        tiles, tile, pair = self._tiles
        bits = self._bits(block)
        keys = bits[:, 0].reshape(layers, heads, tiles, d // pair, tile, pair).swapaxes(3, 4)
        values = bits[:, 1].reshape(layers, heads, tiles, tile // pair, d, pair).swapaxes(4, 5)
        both = jnp.stack([x.reshape(layers, heads, tiles * tile, d) for x in (keys, values)], axis=1)
        return both.reshape(self.token_order)

    def pack(self, tokens: jax.Array) -> jax.Array:
        layers, _, heads, _, d = self.token_order
        tiles, tile, pair = self._tiles
        keys = tokens[:, 0].reshape(layers, heads, tiles, tile, d // pair, pair).swapaxes(3, 4)
        values = tokens[:, 1].reshape(layers, heads, tiles, tile // pair, pair, d).swapaxes(4, 5)
        both = jnp.stack([x.reshape(layers, heads, tiles * tile * d) for x in (keys, values)], axis=1)
        return jax.lax.bitcast_convert_type(both, jnp.float32) if pair == 1 else both


class PallasLayout(BlockLayout):
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


class LibraryLayout(BlockLayout):
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
