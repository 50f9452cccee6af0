"""Independent float64 formulas that kernels and logits processing are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def softmax(scores: Float64) -> Float64:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def causal_attention(q: Float64, keys: Float64, values: Float64, window: int | None) -> Float64:
    """q [n, heads, d] of the last n of m positions; keys and values [m, kv_heads, d] -> [n, heads, d]."""
    n, heads, d = q.shape
    m, kv_heads, _ = keys.shape
    out = np.zeros_like(q)
    position = np.arange(m - n, m)[:, None]
    key = np.arange(m)[None, :]
    seen = (key <= position) & (key > position - (window or m + 1))
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = q[:, head] @ keys[:, shared].T / np.sqrt(d)
        out[:, head] = softmax(np.where(seen, scores, -np.inf)) @ values[:, shared]
    return out


def cut_distribution(logits: Float64, temperature: float, top_k: int, top_p: float, min_p: float) -> Float64:
    """The distribution that sampling draws from: temperature, then min-p, top-k and top-p by sorting."""
    p = softmax(logits / temperature)
    p = np.where(p >= min_p * p.max(), p, 0)
    if top_k:
        p = np.where(p >= np.sort(p)[-min(top_k, len(p))], p, 0)
    p = p / p.sum()
    if top_p < 1:
        order = np.argsort(-p)
        needed = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        p = np.where(p >= p[order[min(needed, len(p)) - 1]], p, 0)
    result: Any = p / p.sum()
    return result  # type: ignore[no-any-return]
