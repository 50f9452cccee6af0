"""CPU kernels in C++, called through jax.ffi: a linear layer over packed weights, ragged paged attention, sampling.

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
    "sliceserve_attention": "SliceserveAttention",
    "sliceserve_sample": "SliceserveSample",
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


def pack_weight(weight: np.ndarray) -> np.ndarray:
    """[n, k] float32 or bfloat16 -> [ceil(n / 32), k / pair, 32, pair], the order in which the linear kernel reads.

    pair is 2 for bfloat16 (returned as uint16) and 1 for float32; missing outputs are zero.
    """
    n, k = weight.shape
    raw = weight.view(np.uint16) if weight.dtype.itemsize == 2 else weight.astype(np.float32, copy=False)
    pair = 4 // raw.dtype.itemsize
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


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_rows: jax.Array,
    *,
    scale: float,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Writes k and v [t, kv_heads, d] into the cache and attends with q [t, heads, d]; all float32.

    cache [layers, blocks, 2, kv_heads, block_size * d] (uint16 or float32) is updated in place and returned second.
    """
    results = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(cache.shape, cache.dtype))
    call = jax.ffi.ffi_call("sliceserve_attention", results, input_output_aliases={3: 1})
    out, cache = call(
        q,
        k,
        v,
        cache,
        layer,
        block_tables,
        kv_lens,
        query_starts,
        num_rows,
        scale=np.float32(scale),
        window=np.int64(window),
    )
    return out, cache
