"""SlotTable: the numeric state of running requests, as arrays indexed by slot.

The scheduler advances all decoding requests with a few numpy operations per step instead of a Python loop over rows;
only requests that start, end, prefill or need another block are touched one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.batch import FROM_DEVICE, Int32, SamplingArrays, SlotState
from engine.running import RequestState


class DecodeRows(NamedTuple):
    """Decoding requests in row order; replaced, never changed, when the set changes."""

    requests: tuple[RequestState, ...]
    slots: Int32  # [R]


NO_ROWS = DecodeRows((), np.zeros(0, np.int32))


class SlotTable:
    """Arrays of S slots. A slot's entries count only while a request has it."""

    def __init__(self, *, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv_len: Int32 = np.zeros(num_slots, np.int32)  # tokens computed when all dispatched steps are done
        self.last_kv_len: Int32 = np.zeros(num_slots, np.int32)  # kv_len after the request's last step
        self.num_known: Int32 = np.zeros(num_slots, np.int32)  # tokens the host knows
        self.last_token: Int32 = np.zeros(num_slots, np.int32)  # the last of them
        self.last_step: Int32 = np.full(num_slots, -1, np.int32)  # last step with a row of this slot
        self.block_tables: Int32 = np.zeros((num_slots, max_blocks), np.int32)
        self._sampling = _neutral_sampling(num_slots)

    def assign(self, state: RequestState, kv_len: int) -> SlotState | None:
        """Fills in the slot of a request that was just admitted with `kv_len` tokens computed already.

        Returns what the backend must know of the slot, if the request's logits are rewritten.
        """
        slot = state.slot
        self.kv_len[slot] = kv_len
        self.last_kv_len[slot] = state.last_kv_len
        self.num_known[slot] = state.num_tokens
        self.last_token[slot] = state.token_ids[-1]
        self.last_step[slot] = -1
        self.block_tables[slot] = 0
        self.extend_blocks(state, 0, kv_len)
        self._set_sampling(state)
        sampling = state.request.sampling
        if not sampling.rewrites_logits:
            return None
        return SlotState(
            slot=slot,
            token_ids=state.known_tokens(),
            logit_bias=sampling.logit_bias,
            bad_words=sampling.bad_words,
            stop_ids=tuple(sorted(state.stop_ids)) if sampling.min_tokens else (),
        )

    def extend_blocks(self, state: RequestState, from_len: int, to_len: int) -> None:
        """Enters the request's blocks for tokens from_len .. to_len - 1 into its block table."""
        first, end = -(-from_len // self.block_size), -(-to_len // self.block_size)
        if first < end:
            self.block_tables[state.slot, first:end] = state.block_ids[first:end]

    def next_decode_tokens(self, slots: Int32, positions: Int32) -> Int32:
        """The input token of each row: the host's where it knows it, else the device's."""
        return np.where(self.num_known[slots] > positions, self.last_token[slots], np.int32(FROM_DEVICE))

    def _set_sampling(self, state: RequestState) -> None:
        params, arrays, slot = state.request.sampling, self._sampling, state.slot
        arrays.temperature[slot] = params.temperature
        arrays.top_k[slot] = params.top_k
        arrays.top_p[slot] = params.top_p
        arrays.min_p[slot] = params.min_p
        arrays.repetition_penalty[slot] = params.repetition_penalty
        arrays.presence_penalty[slot] = params.presence_penalty
        arrays.frequency_penalty[slot] = params.frequency_penalty
        arrays.seed[slot] = (params.seed >> 32, params.seed & 0xFFFFFFFF)
        arrays.prompt_len[slot] = state.prompt_len
        arrays.min_len[slot] = state.prompt_len + params.min_tokens
        arrays.rewrites_logits[slot] = params.rewrites_logits
        arrays.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs

    def sampling_of(self, slots: Int32) -> SamplingArrays:
        """Sampling parameters per row, copied."""
        arrays = self._sampling
        return SamplingArrays(
            temperature=arrays.temperature[slots],
            top_k=arrays.top_k[slots],
            top_p=arrays.top_p[slots],
            min_p=arrays.min_p[slots],
            repetition_penalty=arrays.repetition_penalty[slots],
            presence_penalty=arrays.presence_penalty[slots],
            frequency_penalty=arrays.frequency_penalty[slots],
            seed=arrays.seed[slots],
            prompt_len=arrays.prompt_len[slots],
            min_len=arrays.min_len[slots],
            rewrites_logits=arrays.rewrites_logits[slots],
            num_logprobs=arrays.num_logprobs[slots],
        )


def _neutral_sampling(num_slots: int) -> SamplingArrays:
    return SamplingArrays(
        temperature=np.zeros(num_slots, np.float32),
        top_k=np.zeros(num_slots, np.int32),
        top_p=np.ones(num_slots, np.float32),
        min_p=np.zeros(num_slots, np.float32),
        repetition_penalty=np.ones(num_slots, np.float32),
        presence_penalty=np.zeros(num_slots, np.float32),
        frequency_penalty=np.zeros(num_slots, np.float32),
        seed=np.zeros((num_slots, 2), np.uint32),
        prompt_len=np.zeros(num_slots, np.int32),
        min_len=np.zeros(num_slots, np.int32),
        rewrites_logits=np.zeros(num_slots, np.bool_),
        num_logprobs=np.full(num_slots, -1, np.int32),
    )
