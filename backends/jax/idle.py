"""A step that belongs to nobody: one token, to run a program before the first request owns a block."""

from __future__ import annotations

import numpy as np

from engine.batch import SamplingArrays, StepBatch


def idle_batch() -> StepBatch:
    """One token of one row in block 0, which yields nothing."""
    one = np.ones(1, np.int32)
    zero = np.zeros(1, np.int32)
    unit = np.ones(1, np.float32)
    nothing = np.zeros(1, np.float32)
    off = np.zeros(1, np.bool_)
    sampling = SamplingArrays(
        temperature=unit,
        top_k=zero,
        top_p=unit,
        min_p=nothing,
        repetition_penalty=unit,
        presence_penalty=nothing,
        frequency_penalty=nothing,
        seed=np.zeros((1, 2), np.uint32),
        prompt_len=one,
        min_len=zero,
        rewrites_logits=off,
        num_logprobs=-one,
    )
    return StepBatch(
        step=-1,
        token_ids=zero,
        positions=zero,
        query_lens=one,
        kv_lens=one,
        slots=zero,
        block_tables=np.zeros((1, 1), np.int32),
        samples=off,
        sampling=sampling,
        prompt_logprobs=off,
        target_ids=zero,
    )
