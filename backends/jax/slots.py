"""Per-slot state on the device: the token history, and what rewrites a slot's logits (bias, bad words, banned ids).

The history lets a step take a row's input token from what the device itself sampled, and lets penalties and bad words
see tokens that the host has not read yet. The rest is uploaded once, when a request that needs it gets its slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.backend import Capabilities
from engine.batch import SlotState

NOTHING = -1
"""An unused place in a table of token ids."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SlotTables:
    """S slots and a dump slot; a place that holds NOTHING means nothing."""

    bias_ids: jax.Array  # [S + 1, entries] int32
    bias_values: jax.Array  # [S + 1, entries] float32
    bad_words: jax.Array  # [S + 1, words, tokens] int32, right-aligned
    stop_ids: jax.Array  # [S + 1, ids] int32, banned below min_len


def new_slot_tables(num_slots: int, limits: Capabilities) -> SlotTables:
    rows = num_slots + 1
    return SlotTables(
        bias_ids=jnp.full((rows, limits.logit_bias), NOTHING, jnp.int32),
        bias_values=jnp.zeros((rows, limits.logit_bias), jnp.float32),
        bad_words=jnp.full((rows, limits.bad_words, limits.bad_word_tokens), NOTHING, jnp.int32),
        stop_ids=jnp.full((rows, limits.stop_ids), NOTHING, jnp.int32),
    )


def slot_table_shapes(num_slots: int, limits: Capabilities) -> SlotTables:
    """`new_slot_tables` with ShapeDtypeStructs in place of arrays."""
    shapes: SlotTables = jax.eval_shape(lambda: new_slot_tables(num_slots, limits))
    return shapes


def history_shape(num_slots: int, max_model_len: int) -> tuple[int, int]:
    """Token history, int32: one slot more, to which padding rows write, and one token, which nobody reads."""
    return num_slots + 1, max_model_len + 1


def slot_bytes(num_slots: int, max_model_len: int, limits: Capabilities) -> int:
    """What history and tables take, on each device."""
    tables: list[jax.ShapeDtypeStruct] = jax.tree.leaves(slot_table_shapes(num_slots, limits))
    sizes = [(x.shape, x.dtype.itemsize) for x in tables] + [(history_shape(num_slots, max_model_len), 4)]
    return sum(math.prod(shape) * item for shape, item in sizes)


def slot_row(state: SlotState, limits: Capabilities, width: int) -> tuple[SlotTables, jax.Array]:
    """One slot's rows of the tables and of the history (`width` wide), as host arrays of fixed shape."""
    bias_ids = np.full(limits.logit_bias, NOTHING, np.int32)
    bias_values = np.zeros(limits.logit_bias, np.float32)
    bias_ids[: len(state.logit_bias)] = list(state.logit_bias.keys())
    bias_values[: len(state.logit_bias)] = list(state.logit_bias.values())
    bad_words = np.full((limits.bad_words, limits.bad_word_tokens), NOTHING, np.int32)
    for row, word in zip(bad_words, state.bad_words, strict=False):
        row[limits.bad_word_tokens - len(word) :] = word
    stop_ids = np.full(limits.stop_ids, NOTHING, np.int32)
    stop_ids[: len(state.stop_ids)] = state.stop_ids
    history = np.zeros(width, np.int32)
    history[: len(state.token_ids)] = state.token_ids
    tables = SlotTables(bias_ids=bias_ids, bias_values=bias_values, bad_words=bad_words, stop_ids=stop_ids)  # type: ignore[arg-type]
    return tables, history  # type: ignore[return-value]


def write_slot(
    tables: SlotTables, history: jax.Array, slot: jax.Array, row: SlotTables, row_history: jax.Array
) -> tuple[SlotTables, jax.Array]:
    """Replaces one slot's state; both arguments are donated."""
    tables = jax.tree.map(lambda whole, part: whole.at[slot].set(part), tables, row)
    return tables, history.at[slot].set(row_history)
