"""CPU kernels in C++, called through jax.ffi: linear layers over packed weights, norms, ragged attention, sampling.

XLA's CPU matrix products run bfloat16 at a tenth of what the machine can do, and it has no ragged attention.
`load_kernels` compiles (once) and registers them; the functions below are their typed faces.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax.native.build import build

BLOCK = 32
"""Outputs per packed weight block (kBlock in linear.h)."""
_TARGETS = {
    "sliceserve_linear": "SliceserveLinear",
    "sliceserve_linear_int8": "SliceserveLinearInt8",
    "sliceserve_rms_norm": "SliceserveRmsNorm",
    "sliceserve_gated_silu": "SliceserveGatedSilu",
    "sliceserve_attention": "SliceserveAttention",
    "sliceserve_sample": "SliceserveSample",
    "sliceserve_read_blocks": "SliceserveReadBlocks",
    "sliceserve_write_blocks": "SliceserveWriteBlocks",
}
_loaded: list[ctypes.CDLL] = []


def load_kernels(cache_dir: Path) -> None:
    """Compiles and registers the kernels; does nothing the second time.

    Raises:
        BuildError: they can't be compiled here.
        OSError: the library can't be loaded.
    """
    if _loaded:
        return
    library = ctypes.CDLL(str(build(cache_dir)))
    for target, symbol in _TARGETS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    _loaded.append(library)


def packed_shape(n: int, k: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape that pack_weight gives a matrix [n, k]."""
    pair = 1 if itemsize == 4 else 2
    return -(-n // BLOCK), k // pair, BLOCK, pair


def pack_weight(weight: np.ndarray) -> np.ndarray:
    """[n, k] float32, bfloat16 or int8 -> [ceil(n / 32), k / pair, 32, pair], as the linear kernels read it.

    pair is 2 for bfloat16 (returned as uint16) and int8, and 1 for float32; missing outputs are zero.
    """
    n, k = weight.shape
    raw = weight.view(np.uint16) if weight.dtype.itemsize == 2 else weight
    pair = 1 if raw.dtype.itemsize == 4 else 2
    blocks = -(-n // BLOCK)
    if blocks * BLOCK != n:
        raw = np.concatenate([raw, np.zeros((blocks * BLOCK - n, k), raw.dtype)])
    return np.ascontiguousarray(raw.reshape(blocks, BLOCK, k // pair, pair).transpose(0, 2, 1, 3))


def linear(x: jax.Array, weight: jax.Array, layer: jax.Array, num_tokens: jax.Array, out_features: int) -> jax.Array:
    """x [t, k] float32, weight [layers, *packed] -> [t, out_features] float32.

    Rows from num_tokens [1] on are not computed and come back as zeros.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], out_features), jnp.float32)
    call = jax.ffi.ffi_call("sliceserve_linear", result)
    return call(x, weight, layer, num_tokens)


def pack_scales(scale: np.ndarray) -> np.ndarray:
    """[n] float32 -> [ceil(n / 32), 32], zero for missing outputs."""
    return np.pad(scale, (0, -scale.shape[0] % BLOCK)).reshape(-1, BLOCK)


def linear_int8(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    layer: jax.Array,
    num_tokens: jax.Array,
    *,
    out_features: int,
    exact: bool,
) -> jax.Array:
    """Like linear, with weight [layers, *packed] int8 and scale [layers, blocks, 32] float32.

    Unless exact, activations may be rounded to 16 bits (see linear_int8.h).
    """
    result = jax.ShapeDtypeStruct((x.shape[0], out_features), jnp.float32)
    call = jax.ffi.ffi_call("sliceserve_linear_int8", result)
    return call(x, weight, scale, layer, num_tokens, exact=exact)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    num_rows: jax.Array,
) -> jax.Array:
    """Next token of each of the first num_rows [1] rows of logits [r, vocab] float32; int32 [r].

    temperature, top_p, min_p and uniform (in [0, 1)) are float32 [r], top_k int32 [r]; temperature 0 is greedy.
    """
    call = jax.ffi.ffi_call("sliceserve_sample", jax.ShapeDtypeStruct((logits.shape[0],), jnp.int32))
    return call(logits, temperature, top_k, top_p, min_p, uniform, num_rows)


def rms_norm(x: jax.Array, weight: jax.Array, num_tokens: jax.Array, *, epsilon: float) -> jax.Array:
    """x [t, n] / rms(x) * weight [n], float32; rows from num_tokens [1] on come back as zeros."""
    call = jax.ffi.ffi_call("sliceserve_rms_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, weight, num_tokens, epsilon=np.float32(epsilon))


def gated_silu(gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """silu(gate) * up for gate_up [t, 2 n] float32 -> [t, n]; rows from num_tokens [1] on come back as zeros."""
    result = jax.ShapeDtypeStruct((gate_up.shape[0], gate_up.shape[1] // 2), jnp.float32)
    return jax.ffi.ffi_call("sliceserve_gated_silu", result)(gate_up, num_tokens)


def ragged_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_rows: jax.Array,
    *,
    num_heads: int,
    scale: float,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Rotates, writes keys and values into the cache and attends; qkv [t, heads + 2 kv_heads, d] float32.

    cos and sin are [t, d / 2]. cache [layers, blocks, 2, kv_heads, block_size * d] (uint16 or float32) is updated in
    place and returned behind the heads' outputs [t, heads, d].
    """
    result = jax.ShapeDtypeStruct((qkv.shape[0], num_heads, qkv.shape[2]), jnp.float32)
    results = (result, jax.ShapeDtypeStruct(cache.shape, cache.dtype))
    call = jax.ffi.ffi_call("sliceserve_attention", results, input_output_aliases={3: 1})
    arrays = (qkv, cos, sin, cache, layer, block_tables, kv_lens, query_starts, num_rows)
    out, cache = call(*arrays, scale=np.float32(scale), window=np.int64(window))
    return out, cache


def read_blocks(cache: jax.Array, ids: jax.Array, count: jax.Array, head_dim: int) -> jax.Array:
    """The first `count` [1] of blocks `ids` [n] of a cache as above, [layers, 2, kv_heads, n * block_size, d].

    What is behind them may be anything.
    """
    layers, _, _, kv_heads, elements = cache.shape
    tokens = ids.shape[0] * elements // head_dim
    result = jax.ShapeDtypeStruct((layers, 2, kv_heads, tokens, head_dim), cache.dtype)
    read: jax.Array = jax.ffi.ffi_call("sliceserve_read_blocks", result)(cache, ids, count)
    return read


def write_blocks(cache: jax.Array, data: jax.Array, ids: jax.Array, count: jax.Array, kept: jax.Array) -> jax.Array:
    """The inverse, in place; the first `kept` [1] tokens of the first block stay as they are."""
    result = jax.ShapeDtypeStruct(cache.shape, cache.dtype)
    call = jax.ffi.ffi_call("sliceserve_write_blocks", result, input_output_aliases={0: 0})
    written: jax.Array = call(cache, data, ids, count, kept)
    return written
