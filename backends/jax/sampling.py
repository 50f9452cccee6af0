"""Choosing tokens on the device: greedy, or one inverse-CDF draw from the distribution cut by top-k, top-p and min-p.

The random number of a row is uniform(fold_in(key(seed), position)): it depends on nothing else in the batch. The cuts
are thresholds on a token's weight, found without a sort; ties at the edge stay in.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from backends.jax import native
from backends.jax.logits import RowParams

Sampler = Callable[[jax.Array, RowParams, jax.Array], jax.Array]
"""(logits [R, vocab] float32, rows, num_rows [1]) -> chosen ids [R] int32."""

_ROUNDS = 31  # bits of a positive float32: the search for a threshold is exact after as many halvings


def uniforms(rows: RowParams) -> jax.Array:
    """One float32 in [0, 1) per row."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(rows.seed, rows.lengths)


def sample_native(logits: jax.Array, rows: RowParams, num_rows: jax.Array) -> jax.Array:
    """Sampler by the C++ kernel."""
    return native.sample(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, uniforms(rows), num_rows)


def sample_xla(logits: jax.Array, rows: RowParams, num_rows: jax.Array) -> jax.Array:  # noqa: ARG001
    """Sampler in plain XLA."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(logits, rows), lambda: greedy)
    return jnp.where(rows.temperature > 0, drawn, greedy)


def _draw(logits: jax.Array, rows: RowParams) -> jax.Array:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    cut = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    weights = jax.lax.cond(cut, lambda w: _cut(w, rows), lambda w: w, weights)
    mass = jnp.cumsum(weights, axis=-1)
    target = uniforms(rows)[:, None] * mass[:, -1:]
    # The last live token catches a target that rounding put at the very end.
    live = weights > 0
    last = weights.shape[-1] - 1 - jnp.argmax(live[:, ::-1], axis=-1)
    first = jnp.argmax((mass > target) & live, axis=-1)
    return jnp.where(jnp.any((mass > target) & live, axis=-1), first, last).astype(jnp.int32)


def _cut(weights: jax.Array, rows: RowParams) -> jax.Array:
    """Zeroes what top-k, then top-p of the rest, cut off."""
    vocab = weights.shape[-1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab).astype(jnp.float32)
    weights = _keep_at_least(weights, jnp.ones_like(weights), k)
    wanted = jnp.where(rows.top_p < 1, rows.top_p, 2.0) * jnp.sum(weights, axis=-1)
    return _keep_at_least(weights, weights, wanted)


def _keep_at_least(weights: jax.Array, measure: jax.Array, wanted: jax.Array) -> jax.Array:
    """Keeps the heaviest tokens whose measures sum up to `wanted` [R] (all, if they never do)."""
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)  # order-preserving for what is not negative

    def halve(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (1 << (_ROUNDS - 1 - i))
        enough = jnp.sum(jnp.where(bits >= candidate[:, None], measure, 0.0), axis=-1) >= wanted
        return jnp.where(enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, _ROUNDS, halve, jnp.zeros(weights.shape[0], jnp.int32))
    return jnp.where(bits >= threshold[:, None], weights, 0.0)
