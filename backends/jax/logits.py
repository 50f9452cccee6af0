"""Logits processing: penalties, bias, bad words, minimum length; and log-probabilities from the raw logits.

Both run inside `lax.cond`: the program is the same whatever requests ask for, and where nobody asks nobody pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax.slots import NOTHING, SlotTables
from engine.request import MAX_TOP_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowParams:
    """Sampling parameters of R rows; see engine.batch.SamplingArrays."""

    slots: jax.Array  # int32
    lengths: jax.Array  # int32, tokens known to the device = position of the token to be chosen
    samples: jax.Array  # bool
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array  # [R, 2] uint32
    prompt_len: jax.Array
    min_len: jax.Array
    rewrites: jax.Array  # bool


def rewrite_logits(logits: jax.Array, history: jax.Array, tables: SlotTables, rows: RowParams) -> jax.Array:
    """Applies what the rows that ask for it ask for; logits [R, vocab] float32."""
    seen = history[rows.slots]  # [R, length]
    rewritten = _penalize(logits, seen, rows)
    rewritten = _add_bias(rewritten, tables.bias_ids[rows.slots], tables.bias_values[rows.slots])
    banned = _completing(seen, tables.bad_words[rows.slots], rows.lengths)
    too_short = (rows.lengths < rows.min_len)[:, None]
    stops = jnp.where(too_short, tables.stop_ids[rows.slots], NOTHING)
    rewritten = _ban(_ban(rewritten, banned), stops)
    return jnp.where(rows.rewrites[:, None], rewritten, logits)


def _penalize(logits: jax.Array, seen: jax.Array, rows: RowParams) -> jax.Array:
    """Repetition over prompt and output (Keskar et al. 2019, CTRL), presence and frequency over output (OpenAI)."""
    index = jnp.arange(seen.shape[1])[None, :]
    known = index < rows.lengths[:, None]
    generated = known & (index >= rows.prompt_len[:, None])
    row = jnp.arange(seen.shape[0])[:, None]
    occurs = jnp.zeros(logits.shape, jnp.bool_).at[row, seen].max(known)
    counts = jnp.zeros(logits.shape, jnp.float32).at[row, seen].add(generated.astype(jnp.float32))
    repetition = rows.repetition_penalty[:, None]
    logits = jnp.where(occurs, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - rows.frequency_penalty[:, None] * counts - rows.presence_penalty[:, None] * (counts > 0)


def _places(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scatter indices of ids [R, n]; NOTHING falls off the end."""
    return jnp.arange(logits.shape[0])[:, None], jnp.where(ids == NOTHING, logits.shape[1], ids)


def _add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    return logits.at[_places(logits, ids)].add(values, mode="drop")


def _ban(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return logits.at[_places(logits, ids)].set(-jnp.inf, mode="drop")


def _completing(seen: jax.Array, bad_words: jax.Array, lengths: jax.Array) -> jax.Array:
    """The last token of each bad word whose other tokens are the row's newest ones, else NOTHING; [R, words]."""
    before = bad_words.shape[-1] - 1
    index = lengths[:, None] - before + jnp.arange(before)
    recent = jnp.take_along_axis(seen, jnp.maximum(index, 0), axis=1)
    recent = jnp.where(index >= 0, recent, NOTHING - 1)  # matches no token
    prefix = bad_words[..., :-1]
    matches = jnp.all((prefix == NOTHING) | (prefix == recent[:, None, :]), axis=-1)
    return jnp.where(matches, bad_words[..., -1], NOTHING)


def logprobs(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Log-probabilities of raw logits [M, vocab], packed as int32 [M, 1 + 2K]: chosen id's, K top ids, K top values."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, chosen[:, None], axis=-1) - normalizer
    values, ids = jax.lax.top_k(logits, MAX_TOP_LOGPROBS)
    as_int = jax.lax.bitcast_convert_type(jnp.concatenate([own, values - normalizer], axis=-1), jnp.int32)
    return jnp.concatenate([as_int[:, :1], ids.astype(jnp.int32), as_int[:, 1:]], axis=-1)


LOGPROB_COLUMNS = 1 + 2 * MAX_TOP_LOGPROBS
