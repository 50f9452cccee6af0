"""StepBatch and StepResult: what one engine step sends to the hardware and gets back (plain numpy).

A step is one ragged batch. Rows (one per running request) come in the scheduler's order, decode rows (one query token)
first; everything per row uses that order. Nothing is padded here: a backend pads to its own buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
UInt32 = NDArray[np.uint32]

FROM_DEVICE = -1
"""A token id that only the device knows yet: the one it sampled for this slot at this position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """What a slot must know before its first row when the request's logits are rewritten (penalties, bias, bans).

    Backends keep one token history per slot on the device (`history[slot, position]`), written by sampling; this fills
    in the part that the device has not seen (prompt tokens, prefix hits, tokens from before a preemption).
    """

    slot: int
    token_ids: Int32  # [n] every token known to the host, prompt and output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()  # banned while fewer than min_tokens tokens are generated


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingArrays:
    """Per-row sampling parameters; R rows. Neutral values where a request asked for nothing."""

    temperature: Float32  # [R] 0 = greedy
    top_k: Int32  # [R] 0 = off
    top_p: Float32  # [R]
    min_p: Float32  # [R]
    repetition_penalty: Float32  # [R]
    presence_penalty: Float32  # [R]
    frequency_penalty: Float32  # [R]
    seed: UInt32  # [R, 2] high and low word
    prompt_len: Int32  # [R] tokens of the prompt (output tokens start here)
    min_len: Int32  # [R] prompt_len + min_tokens: stop ids are banned for tokens at positions below it
    rewrites_logits: Bool  # [R] whether the slot's SlotState counts for this row
    num_logprobs: Int32  # [R] -1 = none, else how many alternatives


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step: T query tokens of R rows. `positions` of a row are consecutive and end at kv_len - 1."""

    step: int
    token_ids: Int32  # [T] flat, row after row; FROM_DEVICE where the previous step's result is not read yet
    positions: Int32  # [T]
    query_lens: Int32  # [R] at least 1
    kv_lens: Int32  # [R] tokens in the KV cache when this step is done
    slots: Int32  # [R]
    block_tables: Int32  # [R, B] block ids, row-wise valid up to ceil(kv_len / block_size), 0 behind
    samples: Bool  # [R] whether the row's last token yields a new token (False: the prompt goes on next step)
    sampling: SamplingArrays
    slot_states: tuple[SlotState, ...] = ()  # to be applied before the step
    prompt_logprobs: Bool  # [R] whether logprobs of this row's query tokens' successors are wanted
    target_ids: Int32  # [T] the token after each query token where prompt_logprobs, else 0

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.query_lens.shape[0])

    @property
    def is_decode_only(self) -> bool:
        return self.num_tokens == self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobArrays:
    """Natural-log probabilities from raw logits for M positions, K = MAX_TOP_LOGPROBS alternatives, sorted."""

    chosen: Float32  # [M]
    top_ids: Int32  # [M, K]
    top_logprobs: Float32  # [M, K]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    step: int
    token_ids: Int32  # [R] sampled ids; rows that don't sample hold -1
    logprobs: LogprobArrays | None = None  # [R], when any row asked
    prompt_logprobs: LogprobArrays | None = None  # [T] in the batch's token order, when any row asked
