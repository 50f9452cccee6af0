"""Weight-only int8: symmetric, one float32 scale per output channel, made on the host from full-precision tensors.

A channel w becomes q = round(w / s) with s = max|w| / 127, so that |w - s q| <= s / 2. One scale per row of the stored
[out, in] matrix serves products (the scale multiplies the result) and embeddings (a row is a token) alike, and doesn't
care along which axis tensor parallelism cuts the matrix afterwards.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LARGEST = 127
"""Of int8, on both sides: -128 is not used, so that the range is symmetric."""
_CHUNK_BYTES = 1 << 20
"""Rows are taken in chunks that stay in a core's cache through the passes over them."""
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # of a channel of zeros: anything but 0, which nothing can be divided by


def quantize_rows(matrix: Array) -> tuple[Array, Array]:
    """[out, in] of any float type -> int8 [out, in] and float32 scales [out].

    Raises:
        ValueError: the matrix holds infinities or NaNs.
    """
    rows, columns = matrix.shape
    data, scale = np.empty((rows, columns), np.int8), np.empty(rows, np.float32)
    step = max(1, _CHUNK_BYTES // max(1, 4 * columns))

    def quantize_chunk(start: int) -> None:
        chunk = matrix[start : start + step].astype(np.float32)
        with np.errstate(invalid="ignore"):  # what is not finite is refused below
            largest = np.maximum(chunk.max(axis=1, initial=0), -chunk.min(axis=1, initial=0))
            s = np.maximum(largest / np.float32(LARGEST), _SMALLEST_SCALE)
            data[start : start + step] = np.rint(np.divide(chunk, s[:, None], out=chunk), out=chunk)
        scale[start : start + step] = s

    for _ in _pool().map(quantize_chunk, range(0, rows, step)):
        pass
    if not np.isfinite(scale).all():
        raise ValueError("it holds values that are not finite")
    return data, scale


def dequantize_rows(data: Array, scale: Array) -> Array:
    """The float32 matrix that quantized rows stand for."""
    rows: Array = data.astype(np.float32) * scale[:, None]
    return rows


@cache
def _pool() -> ThreadPoolExecutor:
    """NumPy works without the interpreter lock, and nothing else has anything to do while weights load."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="quantize")
