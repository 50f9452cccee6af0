"""The mock backend by itself: its text, its clock, and that its checks notice what is wrong with a batch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends import create_backend
from backends.mock import MockBackend, mock_tokens
from engine.backend import BackendError
from engine.batch import FROM_DEVICE, SamplingArrays, StepBatch
from engine.config import EngineConfig

Row = tuple[int, int, list[int], list[int]]  # slot, first position, token ids, block table


def sampling(rows: int, **fields: Any) -> SamplingArrays:
    zeros, ones, ints = np.zeros(rows, np.float32), np.ones(rows, np.float32), np.zeros(rows, np.int32)
    neutral: dict[str, Any] = {
        **dict.fromkeys(("temperature", "min_p", "presence_penalty", "frequency_penalty"), zeros),
        **dict.fromkeys(("top_p", "repetition_penalty"), ones),
        **dict.fromkeys(("top_k", "prompt_len", "min_len"), ints),
        "seed": np.zeros((rows, 2), np.uint32),
        "rewrites_logits": np.zeros(rows, np.bool_),
        "num_logprobs": np.full(rows, -1, np.int32),
    }
    return SamplingArrays(**{**neutral, **fields})


def batch(step: int, *rows: Row, **fields: Any) -> StepBatch:
    lens = np.array([len(tokens) for _, _, tokens, _ in rows], np.int32)
    tables = np.zeros((len(rows), max(len(table) for *_, table in rows)), np.int32)
    for index, (*_, table) in enumerate(rows):
        tables[index, : len(table)] = table
    whole: dict[str, Any] = {
        "step": step,
        "token_ids": np.array([token for _, _, tokens, _ in rows for token in tokens], np.int32),
        "positions": np.concatenate([np.arange(start, start + len(tokens)) for _, start, tokens, _ in rows]),
        "query_lens": lens,
        "kv_lens": lens + np.array([start for _, start, _, _ in rows], np.int32),
        "slots": np.array([slot for slot, *_ in rows], np.int32),
        "block_tables": tables,
        "samples": np.ones(len(rows), np.bool_),
        "sampling": sampling(len(rows)),
        "prompt_logprobs": np.zeros(len(rows), np.bool_),
        "target_ids": np.zeros(int(lens.sum()), np.int32),
    }
    return StepBatch(**{**whole, **fields})


def loaded(*, check: bool = True, **options: Any) -> MockBackend:
    options = {"backend": "mock", "block_size": 8, "max_model_len": 64, "num_blocks": 16, **options}
    backend = MockBackend(EngineConfig.from_args(options), check=check)
    backend.load()
    return backend


def run(backend: MockBackend, step: StepBatch) -> list[int]:
    tokens: list[int] = backend.dispatch(step).result().token_ids.tolist()
    return tokens


PROMPT = list(range(10, 22))


def test_chunks_and_device_tokens_give_the_text_of_the_whole_prompt() -> None:
    backend = loaded()
    first = batch(0, (3, 0, PROMPT[:5], [7]), samples=np.zeros(1, np.bool_))
    assert run(backend, first) == [-1]
    tokens = run(backend, batch(1, (3, 5, PROMPT[5:], [7, 2])))
    for step in range(2, 6):
        tokens += run(backend, batch(step, (3, 10 + step, [FROM_DEVICE], [7, 2])))
    assert tokens == mock_tokens(PROMPT, 5)


def test_text_depends_on_the_seed_only_when_sampling() -> None:
    seed = np.array([[1, 2]], np.uint32)
    greedy = batch(0, (0, 0, PROMPT, [0, 1]), sampling=sampling(1, seed=seed))
    drawn = batch(1, (1, 0, PROMPT, [2, 3]), sampling=sampling(1, seed=seed, temperature=np.ones(1, np.float32)))
    backend = loaded()
    assert run(backend, greedy) == mock_tokens(PROMPT, 1)
    assert run(backend, drawn) == mock_tokens(PROMPT, 1, seed=(1 << 32) + 2) != mock_tokens(PROMPT, 1)


def test_every_token_of_the_context_counts() -> None:
    texts = [mock_tokens([*PROMPT[:i], 9, *PROMPT[i + 1 :]], 3) for i in range(len(PROMPT))]
    assert len({tuple(text) for text in texts}) == len(PROMPT)
    assert mock_tokens([1, 2], 3) != mock_tokens([2, 1], 3)


def test_tokens_are_ordinary_words_of_the_vocabulary() -> None:
    tokens = mock_tokens(PROMPT, 500)
    assert all(1000 <= token < 29000 for token in tokens)
    assert len(set(tokens)) > 450


def test_result_waits_for_the_simulated_device_and_dispatch_does_not() -> None:
    backend = loaded(mock_step_ms=20, mock_prefill_ms_per_token=5)
    start = time.monotonic()
    steps = [
        backend.dispatch(batch(0, (0, 0, PROMPT, [0, 1]))),  # 20 + 12 * 5 ms
        backend.dispatch(batch(1, (0, 12, [FROM_DEVICE], [0, 1]))),  # 20 ms
    ]
    assert time.monotonic() - start < 0.05
    steps[0].result()
    assert 0.075 < time.monotonic() - start < 0.1
    steps[1].result()
    assert 0.095 < time.monotonic() - start < 0.2


def test_logprobs_are_given_to_steps_that_ask() -> None:
    backend = loaded()
    plain = backend.dispatch(batch(0, (0, 0, PROMPT, [0, 1]))).result()
    assert plain.logprobs is plain.prompt_logprobs is None
    asks = sampling(1, num_logprobs=np.zeros(1, np.int32))
    targets = np.array([*PROMPT[1:], 0], np.int32)
    step = batch(1, (1, 0, PROMPT, [2, 3]), sampling=asks, prompt_logprobs=np.ones(1, np.bool_), target_ids=targets)
    result = backend.dispatch(step).result()
    assert result.logprobs is not None
    assert result.logprobs.top_ids[:, 0].tolist() == result.token_ids.tolist()
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.top_ids[:-1, 0].tolist() == PROMPT[1:]


FIRST: Row = (0, 0, PROMPT, [0, 1])


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (batch(5, (0, 12, [FROM_DEVICE], [0, 1])), "expected step 1"),
        (batch(1, (0, 13, [5], [0, 1])), "KV missing"),
        (batch(1, (0, 12, [FROM_DEVICE], [0, 2])), "KV missing"),
        (batch(1, (0, 12, [FROM_DEVICE], [1, 0])), "KV missing"),
        (batch(1, (4, 12, [FROM_DEVICE], [0, 1])), "nothing was sampled"),
        (batch(1, (0, 12, [FROM_DEVICE], [0])), "block table too short"),
        (batch(1, (0, 12, [FROM_DEVICE], [0, 1, 5])), "not 0 behind"),
        (batch(1, (0, 12, [99999], [0, 1])), "not in vocabulary"),
        (batch(1, (0, 12, [FROM_DEVICE], [0, 16])), "no such block"),
        (batch(1, (0, 12, [FROM_DEVICE], [1, 1])), "twice in its table"),
        (batch(1, (0, 12, [5], [0, 1]), (0, 0, [5], [2])), "a slot has two rows"),
        (batch(1, (0, 12, [5], [0, 1]), (1, 0, [5], [1])), "block 1 is written by row 0"),
        (batch(1, (0, 8, [5], [0, 1]), (1, 0, [5], [0])), "writes block 0"),
        (batch(1, (1, 0, [5, 6], [2]), (0, 12, [FROM_DEVICE], [0, 1])), "a decode row behind a prefill row"),
        (batch(1, (0, 12, [FROM_DEVICE], [0, 1]), positions=np.array([11])), "positions not consecutive"),
        (batch(1, (1, 0, [5] * 60, list(range(2, 10))), (2, 0, PROMPT, [10, 11])), "more tokens than max_step_tokens"),
        (batch(1, (0, 12, [5], [0, 1]), samples=np.ones(2, np.bool_)), "per-row arrays differ"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_noticed(second: StepBatch, problem: str) -> None:
    backend = loaded(max_num_batched_tokens=64)
    run(backend, batch(0, FIRST))
    with pytest.raises(BackendError, match=problem):
        backend.dispatch(replace(second))


def test_kv_of_another_sequence_at_the_same_positions_is_noticed() -> None:
    backend = loaded()
    run(backend, batch(0, FIRST, (1, 0, [*reversed(PROMPT)], [2, 3])))
    with pytest.raises(BackendError, match="KV of different sequences"):
        backend.dispatch(batch(1, (0, 12, [FROM_DEVICE], [2, 1])))


def test_unloaded_backend_says_so() -> None:
    with pytest.raises(BackendError, match="load"):
        MockBackend(EngineConfig.from_args({"backend": "mock"})).dispatch(batch(0, FIRST))


def test_create_backend_chooses_by_name() -> None:
    assert isinstance(create_backend(EngineConfig.from_args({"backend": "mock"})), MockBackend)
    for name in ("auto", "cpu"):
        assert type(create_backend(EngineConfig.from_args({"backend": name}))).__name__ == "JaxBackend"
