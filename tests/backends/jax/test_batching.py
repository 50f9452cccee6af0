"""Company changes nobody's tokens: 64 mixed requests at once give what each gives alone, however they are batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.request import SamplingParams
from tests.backends.jax.engine import Answer, Engine, engine
from tests.backends.models import tiny_llama

NUM_REQUESTS = 64
SHARED_PREFIX = tuple(np.random.default_rng(99).integers(3, 320, 40).tolist())


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded sampling, every logits feature, short and long, a third with a shared prefix."""
    rng = np.random.default_rng(5)
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(3, 320, int(rng.integers(1, 90))).tolist()
        if i % 3 == 0:
            prompt = [*SHARED_PREFIX, *prompt]
        params = SamplingParams(max_tokens=int(rng.integers(1, 30)), temperature=0.0, ignore_eos=i % 5 != 0)
        if i % 2:
            params = replace(params, temperature=0.9, seed=int(rng.integers(0, 2**63)) * 2 + 1)
        features: dict[str, Any] = [
            {},
            {"top_k": 7},
            {"top_p": 0.8},
            {"min_p": 0.05},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"presence_penalty": 0.9, "logit_bias": {5: 2.0, 17: -3.0}},
            {"min_tokens": 4, "stop_token_ids": (11, 12, 13, 14, 15), "ignore_eos": False},
            {"logprobs": 3},
        ][i % 8]
        requests.append((prompt, replace(params, **features)))
    return requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


def options(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "num_blocks": 1200,
        "block_size": 8,
        "max_running_seqs": 64,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "warmup": False,
        **changes,
    }


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[list[Answer]]:
    """Every request's answer when the engine has nothing else to do and nothing cached."""
    with engine(**options(model, enable_prefix_cache_hbm=False)) as running:
        yield [running.run([prompt], params)[0] for prompt, params in mixed_requests()]


WAYS: dict[str, dict[str, Any]] = {
    "everything on": {},
    "chunks of 16 tokens": {"max_num_batched_tokens": 16, "max_running_seqs": 16},
    "chunks of 48 tokens": {"max_num_batched_tokens": 48},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "no prefix cache": {"enable_prefix_cache_hbm": False},
    "blocks run out": {"num_blocks": 48},
    "blocks run out, no prefix cache": {"num_blocks": 48, "enable_prefix_cache_hbm": False},
    "blocks of 32 tokens": {"block_size": 32, "num_blocks": 64},
    "plain XLA": {"attention": "xla", "decode_blocks_padding": 32},
}
ALWAYS = {"everything on", "chunks of 48 tokens", "whole prompts", "blocks run out"}
CASES = [pytest.param(way, marks=[] if way in ALWAYS else [pytest.mark.matrix]) for way in WAYS]


@pytest.mark.parametrize("way", CASES)
def test_64_requests_at_once_give_what_each_gives_alone(model: Path, alone: list[Answer], way: str) -> None:
    prompts, sampling = zip(*mixed_requests(), strict=True)
    with engine(**options(model, **WAYS[way])) as running:
        answers = running.run(prompts, sampling)
        if "run out" in way:
            assert running.core.metrics().values["num_preemptions"] > 0
    for index, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
        assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason), index
        for found, reference in zip(answer.logprobs, expected.logprobs, strict=True):
            assert found.logprob == pytest.approx(reference.logprob, abs=1e-3)
            assert [i for i, _ in found.top] == [i for i, _ in reference.top]


def test_a_repeated_prompt_is_found_in_the_cache(model: Path) -> None:
    prompt = np.random.default_rng(1).integers(3, 320, 100).tolist()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with engine(**options(model)) as running:
        first, second = (running.run([prompt], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96  # whole blocks of 8, and one token at least is computed
    assert first.token_ids == second.token_ids


@pytest.fixture(scope="module")
def warm(model: Path) -> Iterator[Engine]:
    with engine(**options(model, warmup=True)) as running:
        yield running


def test_nothing_compiles_after_warm_up(warm: Engine) -> None:
    prompts, sampling = zip(*mixed_requests(), strict=True)
    warm.run(prompts, [replace(s, prompt_logprobs=2 if i % 7 == 0 else None) for i, s in enumerate(sampling)])
    for prompt, params in zip(prompts[:8], sampling[:8], strict=True):
        warm.run([prompt], params)
    assert warm.core.metrics().values["compilations_after_warmup"] == 0


def test_the_counter_of_compilations_does_count(warm: Engine) -> None:
    import jax

    before = warm.core.metrics().values["compilations_after_warmup"]
    jax.jit(lambda x: x * 3 + 1)(np.ones(7)).block_until_ready()
    assert warm.core.metrics().values["compilations_after_warmup"] > before
