"""Penalties and top log-probabilities as TPUs compute them, against the forms that every platform has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax.logits import RowParams, penalize_by_products, penalize_by_scatters, top_by_rounds, top_by_selection

SLOTS = 6


def random_rows(rng: np.random.Generator, count: int, longest: int) -> RowParams:
    lengths = rng.integers(1, longest + 1, count).astype(np.int32)
    values = {
        "slots": rng.permutation(SLOTS)[:count].astype(np.int32),
        "lengths": lengths,
        "samples": np.ones(count, np.bool_),
        "temperature": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "repetition_penalty": rng.uniform(0.5, 2, count).astype(np.float32),
        "presence_penalty": rng.uniform(-2, 2, count).astype(np.float32),
        "frequency_penalty": rng.uniform(-2, 2, count).astype(np.float32),
        "seed": np.zeros((count, 2), np.uint32),
        "prompt_len": (lengths * rng.uniform(0, 1, count)).astype(np.int32),
        "min_len": np.zeros(count, np.int32),
        "rewrites": np.ones(count, np.bool_),
    }
    return RowParams(**{name: jnp.asarray(value) for name, value in values.items()})


@pytest.mark.parametrize("width", [40, 1024, 1025, 2500])
def test_penalties_by_products_are_those_by_scatters(width: int) -> None:
    """Fewer, as many and more tokens than one chunk, with a vocabulary that is no multiple of the lanes."""
    rng = np.random.default_rng(width)
    count, vocab = 5, 300
    logits = jnp.asarray(rng.standard_normal((count, vocab), np.float32))
    history = jnp.asarray(rng.integers(0, vocab, (SLOTS, width)), jnp.int32)
    rows = random_rows(rng, count, width)
    found, wanted = (jax.jit(f)(logits, history, rows) for f in (penalize_by_products, penalize_by_scatters))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-4)


def test_rows_without_penalties_are_not_counted() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((2, 50), np.float32))
    history = jnp.asarray(rng.integers(0, 50, (SLOTS, 30)), jnp.int32)
    rows = jax.tree.map(jnp.asarray, random_rows(rng, 2, 30))
    off = RowParams(**{**vars(rows), "rewrites": jnp.zeros(2, jnp.bool_)})
    np.testing.assert_array_equal(penalize_by_products(logits, history, off), logits)


def test_top_tokens_by_rounds_are_those_by_selection_ties_included() -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(np.round(rng.standard_normal((7, 900)) * 3), jnp.float32)  # many equal ones
    for found, wanted in zip(jax.jit(top_by_rounds)(logits), jax.jit(top_by_selection)(logits), strict=True):
        np.testing.assert_array_equal(found, wanted)
