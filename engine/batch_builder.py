"""Builds StepBatches from what the scheduler decided.

A step of decode rows only, with the same rows as the step before, reuses everything that did not change. No array is
ever written after it went into a batch, because a backend may hand it to the device without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Bool, Int32, SamplingArrays, SlotState, StepBatch
from engine.running import RequestState
from engine.slot_table import DecodeRows, SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Known tokens start .. end - 1 of a request, to be computed in one step."""

    state: RequestState
    token_ids: Int32  # the chunk's
    start: int
    end: int
    samples: bool  # whether the token after the chunk is sampled

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Constants:
    """Per-row arrays that are the same in every step with the same decode rows."""

    rows: DecodeRows
    ones: Int32
    zeros: Int32
    true: Bool
    false: Bool
    sampling: SamplingArrays


class BatchBuilder:
    def __init__(self, table: SlotTable, *, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._constants: _Constants | None = None

    def build(
        self, step: int, decode: DecodeRows, chunks: Sequence[Chunk], slot_states: tuple[SlotState, ...]
    ) -> StepBatch:
        """The batch of decode rows followed by prefill chunks. Advances `kv_len` of all of them in the table."""
        return self._mixed(step, decode, chunks, slot_states) if chunks else self._decode_only(step, decode)

    def _decode_only(self, step: int, decode: DecodeRows) -> StepBatch:
        table, slots = self._table, decode.slots
        constants = self._constants_for(decode)
        positions = table.kv_len[slots]
        kv_lens = positions + constants.ones
        tokens = table.next_decode_tokens(slots, positions)
        table.kv_len[slots] = kv_lens
        table.last_step[slots] = step
        return StepBatch(
            step=step,
            token_ids=tokens,
            positions=positions,
            query_lens=constants.ones,
            kv_lens=kv_lens,
            slots=slots,
            block_tables=self._block_tables(slots, kv_lens),
            samples=constants.true,
            sampling=constants.sampling,
            prompt_logprobs=constants.false,
            target_ids=constants.zeros,
        )

    def _mixed(
        self, step: int, decode: DecodeRows, chunks: Sequence[Chunk], slot_states: tuple[SlotState, ...]
    ) -> StepBatch:
        table, num_decode = self._table, len(decode.requests)
        decode_positions = table.kv_len[decode.slots]
        slots = np.concatenate([decode.slots, np.array([chunk.state.slot for chunk in chunks], np.int32)])
        starts = np.concatenate([decode_positions, np.array([chunk.start for chunk in chunks], np.int32)])
        query_lens = np.ones(len(slots), np.int32)
        query_lens[num_decode:] = [chunk.num_tokens for chunk in chunks]
        kv_lens = starts + query_lens
        samples = np.ones(len(slots), np.bool_)
        samples[num_decode:] = [chunk.samples for chunk in chunks]
        wants_logprobs = np.zeros(len(slots), np.bool_)
        wants_logprobs[num_decode:] = [chunk.state.prompt_logprobs is not None for chunk in chunks]
        tokens = table.next_decode_tokens(decode.slots, decode_positions)
        no_targets = np.zeros(num_decode, np.int32)
        table.kv_len[slots] = kv_lens
        table.last_step[slots] = step
        return StepBatch(
            step=step,
            token_ids=np.concatenate([tokens, *(chunk.token_ids for chunk in chunks)]),
            positions=_ranges(starts, query_lens),
            query_lens=query_lens,
            kv_lens=kv_lens,
            slots=slots,
            block_tables=self._block_tables(slots, kv_lens),
            samples=samples,
            sampling=table.sampling_of(slots),
            slot_states=slot_states,
            prompt_logprobs=wants_logprobs,
            target_ids=np.concatenate([no_targets, *(_targets(chunk) for chunk in chunks)]),
        )

    def _block_tables(self, slots: Int32, kv_lens: Int32) -> Int32:
        width = -(-int(kv_lens.max()) // self._block_size)
        return self._table.block_tables[slots, :width]

    def _constants_for(self, decode: DecodeRows) -> _Constants:
        constants = self._constants
        if constants is None or constants.rows is not decode:
            count = len(decode.requests)
            constants = self._constants = _Constants(
                decode,
                np.ones(count, np.int32),
                np.zeros(count, np.int32),
                np.ones(count, np.bool_),
                np.zeros(count, np.bool_),
                self._table.sampling_of(decode.slots),
            )
        return constants


def _ranges(starts: Int32, lens: Int32) -> Int32:
    """Concatenated ranges starts[i] .. starts[i] + lens[i] - 1."""
    before = np.cumsum(lens, dtype=np.int32) - lens  # tokens of the rows before
    return np.repeat(starts - before, lens) + np.arange(int(lens.sum()), dtype=np.int32)


def _targets(chunk: Chunk) -> Int32:
    """The prompt token after each of the chunk's tokens, where prompt logprobs are wanted and there is one."""
    targets = np.zeros(chunk.num_tokens, np.int32)
    if chunk.state.prompt_logprobs is not None:
        following = chunk.state.token_ids[chunk.start + 1 : min(chunk.end + 1, chunk.state.prompt_len)]
        targets[: len(following)] = following
    return targets
