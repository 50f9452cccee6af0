"""Logits processing: penalties, bias, bad words, minimum length; and log-probabilities from the raw logits.

Both run inside `lax.cond`: the program is the same whatever requests ask for, and where nobody asks nobody pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from backends.jax.slots import NOTHING, SlotTables
from engine.request import MAX_TOP_LOGPROBS

_LANES = 128
_COUNT_CHUNK = 1024
"""Tokens whose one-hot digits exist at one time."""


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
    rewritten = _penalize(logits, history, rows)
    rewritten = _add_bias(rewritten, tables.bias_ids[rows.slots], tables.bias_values[rows.slots])
    banned = _completing(history, tables.bad_words[rows.slots], rows)
    too_short = (rows.lengths < rows.min_len)[:, None]
    stops = jnp.where(too_short, tables.stop_ids[rows.slots], NOTHING)
    rewritten = _ban(_ban(rewritten, banned), stops)
    return jnp.where(rows.rewrites[:, None], rewritten, logits)


def _penalize(logits: jax.Array, history: jax.Array, rows: RowParams) -> jax.Array:
    """Repetition over prompt and output (Keskar et al. 2019, CTRL), presence and frequency over output (OpenAI)."""
    penalized: jax.Array = jax.lax.platform_dependent(
        logits, history, rows, tpu=penalize_by_products, default=penalize_by_scatters
    )
    return penalized


def _penalized(logits: jax.Array, known: jax.Array, generated: jax.Array, rows: RowParams) -> jax.Array:
    """One row's or all rows' logits, given how often each token occurs in prompt and output, and in the output."""
    repetition, frequency, presence = (
        x[..., None] for x in (rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty)
    )
    logits = jnp.where(known > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * generated - presence * (generated > 0)


def penalize_by_scatters(logits: jax.Array, history: jax.Array, rows: RowParams) -> jax.Array:
    seen = history[rows.slots]
    index = jnp.arange(seen.shape[1])[None, :]
    known = index < rows.lengths[:, None]
    generated = known & (index >= rows.prompt_len[:, None])
    row = jnp.arange(seen.shape[0])[:, None]
    occurs = jnp.zeros(logits.shape, jnp.bool_).at[row, seen].max(known)
    counts = jnp.zeros(logits.shape, jnp.float32).at[row, seen].add(generated.astype(jnp.float32))
    return _penalized(logits, occurs, counts, rows)


def penalize_by_products(logits: jax.Array, history: jax.Array, rows: RowParams) -> jax.Array:
    """The same, counted by the MXU: ids are split into two digits, and a product of one-hot digits counts pairs.

    A TPU would sort a scatter's indices first (half a minute to compile), and then go through them one by one.
    """

    def one_row(index: jax.Array, logits: jax.Array) -> jax.Array:
        row = jax.tree.map(lambda x: x[index], rows)
        known, generated = _count_tokens(history, row, logits.shape[1])
        new = _penalized(logits[index], known, generated, row)
        return logits.at[index].set(new)

    penalized: jax.Array = jax.lax.fori_loop(0, logits.shape[0], one_row, logits)
    return penalized


def _count_tokens(history: jax.Array, row: RowParams, vocab: int) -> tuple[jax.Array, jax.Array]:
    """How often each token occurs in a row that wants penalties: at all, and in its output; float32 [vocab] each."""
    width = history.shape[1]
    chunk, digits = min(_COUNT_CHUNK, width), -(-vocab // _LANES)

    def one_chunk(number: jax.Array, counts: jax.Array) -> jax.Array:
        start = jnp.minimum(number * chunk, width - chunk)  # the last one overlaps the one before
        ids = jax.lax.dynamic_slice(history, (row.slots, start), (1, chunk))[0]
        positions = start + jnp.arange(chunk)
        known = (positions >= number * chunk) & (positions < row.lengths)
        masks = jnp.stack([known, known & (positions >= row.prompt_len)])
        high = jax.nn.one_hot(ids // _LANES, digits, dtype=jnp.bfloat16)
        low = jax.nn.one_hot(ids % _LANES, _LANES, dtype=jnp.bfloat16) * masks[:, :, None]
        return counts + jnp.einsum("ch,kcl->khl", high, low, preferred_element_type=jnp.float32)

    chunks = jnp.where(row.rewrites, -(-row.lengths // chunk), 0)
    counts = jax.lax.fori_loop(0, chunks, one_chunk, jnp.zeros((2, digits, _LANES), jnp.float32))
    flat = counts.reshape(2, -1)[:, :vocab]
    return flat[0], flat[1]


def _places(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scatter indices of ids [R, n]; NOTHING falls off the end, each to a place of its own."""
    outside = logits.shape[1] + jnp.arange(ids.shape[1])
    return jnp.arange(logits.shape[0])[:, None], jnp.where(ids == NOTHING, outside, ids)


def _add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    # A request's ids differ from each other; knowing that spares a sort.
    return logits.at[_places(logits, ids)].add(values, mode="drop", unique_indices=True)


def _ban(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return logits.at[_places(logits, ids)].set(-jnp.inf, mode="drop")


def _completing(history: jax.Array, bad_words: jax.Array, rows: RowParams) -> jax.Array:
    """The last token of each bad word whose other tokens are the row's newest ones, else NOTHING; [R, words]."""
    before = bad_words.shape[-1] - 1
    index = rows.lengths[:, None] - before + jnp.arange(before)
    recent = history[rows.slots[:, None], jnp.maximum(index, 0)]
    recent = jnp.where(index >= 0, recent, NOTHING - 1)  # matches no token
    prefix = bad_words[..., :-1]
    matches = jnp.all((prefix == NOTHING) | (prefix == recent[:, None, :]), axis=-1)
    return jnp.where(matches, bad_words[..., -1], NOTHING)


def logprobs(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Log-probabilities of raw logits [M, vocab], packed as int32 [M, 1 + 2K]: chosen id's, K top ids, K top values."""
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, chosen[:, None], axis=-1) - normalizer
    values, ids = jax.lax.platform_dependent(logits, tpu=top_by_rounds, default=top_by_selection)
    as_int = jax.lax.bitcast_convert_type(jnp.concatenate([own, values - normalizer], axis=-1), jnp.int32)
    return jnp.concatenate([as_int[:, :1], ids.astype(jnp.int32), as_int[:, 1:]], axis=-1)


def top_by_selection(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logits of each row and their ids, [M, K] each; of equal ones the lower id first."""
    values, ids = jax.lax.top_k(logits, MAX_TOP_LOGPROBS)
    return values, ids


def top_by_rounds(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, one after the other: top_k over a vocabulary takes a TPU compiler ten times as long."""
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    shape = (logits.shape[0], MAX_TOP_LOGPROBS)

    def one_round(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rest, values, ids = carry
        best = jnp.argmax(rest, axis=-1).astype(jnp.int32)
        values, ids = values.at[:, k].set(jnp.max(rest, axis=-1)), ids.at[:, k].set(best)
        return jnp.where(columns == best[:, None], -jnp.inf, rest), values, ids

    start = (logits, jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32))
    _, values, ids = jax.lax.fori_loop(0, MAX_TOP_LOGPROBS, one_round, start)
    return values, ids


LOGPROB_COLUMNS = 1 + 2 * MAX_TOP_LOGPROBS
