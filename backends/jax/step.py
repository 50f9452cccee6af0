"""The step program: one compiled function per bucket of tokens, rows and block-table width.

Everything the host says about a step is packed into one int32 array (floats by their bits), because every argument and
every transfer costs host time; `StepShape` knows the layout for both sides. The result is one int32 array, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from backends.jax.attention import AttentionInputs
from backends.jax.logits import RowParams
from backends.jax.model import Decoder, Params
from backends.jax.selection import TokenSelector, Wanted, no_logprobs
from backends.jax.slots import SlotTables
from engine.batch import StepBatch

PROMPT_LOGPROB_TILE = 16
"""Prompt positions whose logits exist at one time; token counts of mixed shapes are multiples of it."""
_ROW_FIELDS = (
    "slots",
    "kv_lens",
    "samples",
    "rewrites",
    "top_k",
    "prompt_len",
    "min_len",
    "seed_high",
    "seed_low",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FLOAT_FIELDS = frozenset(_ROW_FIELDS[_ROW_FIELDS.index("temperature") :])
_TOKEN_FIELDS = ("token_ids", "positions", "token_rows", "target_ids")
_SCALAR_FIELDS = ("num_tokens", "num_rows", "any_rewrites", "any_draws", "any_logprobs", "any_prompt_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StepShape:
    """The static shape of a step program: T tokens, R rows, B blocks a row."""

    tokens: int
    rows: int
    blocks: int
    decode_only: bool  # one token a row, and T == R

    def _fields(self) -> Iterator[tuple[str, int]]:
        yield from ((name, 1) for name in _SCALAR_FIELDS)
        yield from ((name, self.tokens) for name in _TOKEN_FIELDS)
        yield ("query_starts", self.rows + 1)
        yield from ((name, self.rows) for name in _ROW_FIELDS)
        yield ("block_tables", self.rows * self.blocks)

    @property
    def packed_size(self) -> int:
        return sum(size for _, size in self._fields())

    def views(self, packed: Any) -> dict[str, Any]:
        """Named slices of a packed array, on the host (writable views) or the device."""
        views, start = {}, 0
        for name, size in self._fields():
            views[name] = packed[start : start + size]
            start += size
        return views

    def pack(self, batch: StepBatch, dump_slot: int) -> NDArray[np.int32]:
        """Lays a batch out for this shape. Padding rows have no tokens and use the dump slot."""
        packed = np.zeros(self.packed_size, np.int32)
        views = self.views(packed)
        tokens, rows, sampling = batch.num_tokens, batch.num_rows, batch.sampling
        for name, value in (
            ("num_tokens", tokens),
            ("num_rows", rows),
            ("any_rewrites", sampling.rewrites_logits.any()),
            ("any_draws", (sampling.temperature > 0).any()),
            ("any_logprobs", (sampling.num_logprobs >= 0).any()),
            ("any_prompt_logprobs", batch.prompt_logprobs.any()),
        ):
            views[name][0] = value
        views["token_ids"][:tokens] = batch.token_ids
        views["positions"][:tokens] = batch.positions
        views["token_rows"][:tokens] = np.repeat(np.arange(rows, dtype=np.int32), batch.query_lens)
        views["target_ids"][:tokens] = batch.target_ids
        views["query_starts"][:] = tokens
        views["query_starts"][0] = 0
        np.cumsum(batch.query_lens, out=views["query_starts"][1 : rows + 1])
        per_row: dict[str, NDArray[Any]] = {
            "slots": batch.slots,
            "kv_lens": batch.kv_lens,
            "samples": batch.samples,
            "rewrites": sampling.rewrites_logits,
            "seed_high": sampling.seed[:, 0].view(np.int32),
            "seed_low": sampling.seed[:, 1].view(np.int32),
        }
        views["slots"][rows:] = dump_slot
        for name in _ROW_FIELDS:
            array: NDArray[Any] = per_row[name] if name in per_row else getattr(sampling, name)
            views[name][:rows] = array.view(np.int32) if name in _FLOAT_FIELDS else array
        width = min(self.blocks, batch.block_tables.shape[1])
        views["block_tables"].reshape(self.rows, self.blocks)[:rows, :width] = batch.block_tables[:, :width]
        return packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What steps carry on and update in place."""

    cache: jax.Array
    history: jax.Array  # [S + 1, max_model_len + 1] int32


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The function that is compiled for each StepShape: what one chip does."""

    decoder: Decoder
    selector: TokenSelector

    def __call__(
        self, params: Params, state: DeviceState, tables: SlotTables, packed: jax.Array, shape: StepShape
    ) -> tuple[DeviceState, jax.Array, jax.Array]:
        """Runs one step.

        Returns:
            The new state; [R, 1 + LOGPROB_COLUMNS] int32, each row's sampled id (-1: none) and packed logprobs;
            [T, LOGPROB_COLUMNS] packed log-probabilities of each token's successor. Log-probabilities are zeros unless
            some row asks for them, and decode programs have none of the latter.
        """
        views = shape.views(packed)
        inputs = _attention_inputs(views, shape)
        rows = _row_params(views)
        slots = rows.slots[inputs.token_rows]
        fed_back = state.history[slots, inputs.positions]
        token_ids = jnp.where(views["token_ids"] < 0, fed_back, views["token_ids"])
        hidden, cache = self.decoder(params, state.cache, token_ids, inputs)
        last = jnp.maximum(inputs.query_starts[1:] - 1, 0)
        logits = self.decoder.logits(params, hidden[last], inputs.num_rows)
        chosen, packed_logprobs = self.selector(
            logits, state.history, tables, rows, _wanted(views), inputs.num_rows, self.decoder.collectives
        )
        history = _remember(state.history, chosen, rows)
        prompt = no_logprobs(0) if shape.decode_only else self._prompt_logprobs(params, hidden, views)
        result = jnp.concatenate([jnp.where(rows.samples, chosen, -1)[:, None], packed_logprobs], axis=-1)
        return DeviceState(cache=cache, history=history), result, prompt

    def _prompt_logprobs(self, params: Params, hidden: jax.Array, views: dict[str, jax.Array]) -> jax.Array:
        tokens = hidden.shape[0]
        tile = PROMPT_LOGPROB_TILE

        def one_tile(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            states, targets = part
            logits = self.decoder.logits(params, states, jnp.array([tile], jnp.int32))
            return self.selector.prompt_logprobs(logits, targets, self.decoder.collectives)

        def all_tiles() -> jax.Array:
            parts = (hidden.reshape(tokens // tile, tile, -1), views["target_ids"].reshape(tokens // tile, tile))
            return jnp.reshape(jax.lax.map(one_tile, parts), (tokens, -1))

        packed: jax.Array = jax.lax.cond(views["any_prompt_logprobs"][0] != 0, all_tiles, lambda: no_logprobs(tokens))
        return packed


def _wanted(views: dict[str, jax.Array]) -> Wanted:
    return Wanted(
        rewrites=views["any_rewrites"][0] != 0,
        draws=views["any_draws"][0] != 0,
        logprobs=views["any_logprobs"][0] != 0,
    )


def _attention_inputs(views: dict[str, jax.Array], shape: StepShape) -> AttentionInputs:
    return AttentionInputs(
        positions=views["positions"],
        token_rows=views["token_rows"],
        query_starts=views["query_starts"],
        kv_lens=views["kv_lens"],
        block_tables=views["block_tables"].reshape(shape.rows, shape.blocks),
        num_rows=views["num_rows"],
        num_tokens=views["num_tokens"],
        decode_only=shape.decode_only,
    )


def _row_params(views: dict[str, jax.Array]) -> RowParams:
    # In a fixed order: a program that differs from process to process is never found in the persistent cache.
    names = [name for name in _ROW_FIELDS if name in _FLOAT_FIELDS]
    floats = {name: jax.lax.bitcast_convert_type(views[name], jnp.float32) for name in names}
    seed = jnp.stack([views["seed_high"], views["seed_low"]], axis=-1)
    return RowParams(
        slots=views["slots"],
        lengths=views["kv_lens"],
        samples=views["samples"] != 0,
        top_k=views["top_k"],
        prompt_len=views["prompt_len"],
        min_len=views["min_len"],
        rewrites=views["rewrites"] != 0,
        seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
        **floats,
    )


def _remember(history: jax.Array, chosen: jax.Array, rows: RowParams) -> jax.Array:
    """Writes sampled tokens where the next step finds its input; rows that sample nothing write to the dump slot."""
    slots = jnp.where(rows.samples, rows.slots, history.shape[0] - 1)
    return history.at[slots, rows.lengths].set(chosen)
