"""How the TPU cache keeps a token: 32-bit words of 128 lanes, a whole number of 512-byte word rows.

The keys and values of a token's kv heads on this chip are cut into *lane rows* of 128 elements: K0 V0 K1 V1 … of the
first head, then of the next. Heads of up to 64 elements put K and V side by side into one lane row, so that no lane is
wasted. A word row holds as many lane rows as a 32-bit word has elements (float32 1, bfloat16 2, 8 bits 4): the word in
lane i has element i of the first lane row in its lowest bits.

So the cache is [layers, blocks + 1, block_size, R, 1, 128] uint32. TPUs lay it out without padding whatever R is (1 kv
head or 5), a token is one contiguous piece that DMAs move alone, and one layout and one kernel do for all dtypes. Two
things waste memory, and bytes_per_block counts both: heads that fill no whole lane rows (of 96 elements a quarter), and
tokens that fill no whole words (8-bit caches with one kv head a chip: half).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128
WORD_ROW_BYTES = 4 * LANES
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True, kw_only=True, slots=True)
class WordLayout:
    """Where the elements of a token's keys and values are."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def packing(self) -> int:
        """Elements of a word."""
        return 4 // self.itemsize

    @property
    def side_by_side(self) -> bool:
        """Whether a head's K and V share a lane row."""
        return self.head_dim <= LANES // 2

    @property
    def chunks(self) -> int:
        """Lane rows of one head's keys."""
        return -(-self.head_dim // LANES)

    @property
    def rows_per_head(self) -> int:
        return 1 if self.side_by_side else 2 * self.chunks

    @property
    def word_rows(self) -> int:
        return -(-self.num_kv_heads * self.rows_per_head // self.packing)

    def key_row(self, head: int, chunk: int) -> int:
        return head * self.rows_per_head + (0 if self.side_by_side else 2 * chunk)

    def value_row(self, head: int, chunk: int) -> int:
        return head * self.rows_per_head + (0 if self.side_by_side else 2 * chunk + 1)

    def pack(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Keys and values [T, kv_heads, d] of the cache's dtype -> [T, R, 1, 128] uint32."""
        width = LANES // 2 if self.side_by_side else LANES * self.chunks
        both = [self._bits(jnp.pad(x, ((0, 0), (0, 0), (0, width - self.head_dim)))) for x in (keys, values)]
        if self.side_by_side:
            both = [jnp.concatenate(both, axis=-1)]
        lane_rows = [x.reshape(x.shape[0], -1, LANES) for x in both]
        if self.packing == 1:
            words = jnp.stack(lane_rows, axis=2)
            return words.reshape(words.shape[0], self.word_rows, 1, LANES)
        # K and V of a head share words first, then several heads.
        words = sum((x << (8 * self.itemsize * i) for i, x in enumerate(lane_rows)), start=jnp.uint32(0))
        sharing = self.packing // len(lane_rows)
        words = jnp.pad(words, ((0, 0), (0, -words.shape[1] % sharing), (0, 0)))
        shift = 32 // sharing
        words = sum((words[:, i::sharing] << (shift * i) for i in range(sharing)), start=jnp.uint32(0))
        return words[:, :, None, :]

    def _bits(self, x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, _UNSIGNED[self.itemsize]).astype(jnp.uint32)

    def unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., R, 1, 128] uint32 -> keys and values [..., kv_heads, d] of the cache's dtype."""
        lead = words.shape[:-3]
        shifts = 8 * self.itemsize * jnp.arange(self.packing, dtype=jnp.uint32)[:, None]
        bits = (words >> shifts).astype(_UNSIGNED[self.itemsize])  # [..., R, packing, 128]
        lane_rows = jax.lax.bitcast_convert_type(bits, jnp.dtype(self.dtype))
        lane_rows = lane_rows.reshape(*lead, -1, LANES)[..., : self.num_kv_heads * self.rows_per_head, :]
        if self.side_by_side:
            both = lane_rows.reshape(*lead, self.num_kv_heads, 2, LANES // 2)
        else:
            chunked = lane_rows.reshape(*lead, self.num_kv_heads, self.chunks, 2, LANES).swapaxes(-3, -2)
            both = chunked.reshape(*lead, self.num_kv_heads, 2, self.chunks * LANES)
        return both[..., 0, : self.head_dim], both[..., 1, : self.head_dim]
