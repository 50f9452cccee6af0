"""Several chips give what one gives: logits, tokens, log-probabilities, whatever the sizes and however they divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from engine.backend import BackendError
from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.text.tokenizer import load_tokenizer
from tests.backends.jax.engine import Answer, engine, prompt_logits
from tests.backends.models import tiny_llama

MODELS: dict[str, dict[str, Any]] = {
    "2 kv heads for 8": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16},
    "8 kv heads for 8": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 16},
    "1 kv head for 8, tied": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 16, "tie": True},
    "3 kv heads for 9, odd sizes, biases": {
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 16,
        "hidden_size": 72,
        "vocab_size": 333,
        "intermediate_size": 101,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
ALWAYS = {("2 kv heads for 8", 8), ("3 kv heads for 9, odd sizes, biases", 4)}
CASES = [
    pytest.param(name, chips, marks=[] if (name, chips) in ALWAYS else pytest.mark.matrix, id=f"{name}-{chips}")
    for name in MODELS
    for chips in (2, 3, 4, 8)
]
# Few programs: 8 rows, and 16 or 32 tokens.
SMALL = {
    "num_blocks": 200,
    "block_size": 8,
    "max_running_seqs": 8,
    "max_num_batched_tokens": 32,
    "prefill_len_padding": 16,
    "max_model_len": 128,
    "warmup": False,
}
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 2**63 + 11},
    {"temperature": 1.2, "seed": 3, "top_k": 7, "min_p": 0.01},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "logprobs": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"temperature": 0.7, "seed": 5, "logit_bias": {5: 2.0, 319: 4.0, 17: -3.0}},
    {"bad_words": ((7,), (8, 9), (100, 101, 102))},
    {"min_tokens": 6, "stop_token_ids": tuple(range(3, 30)), "ignore_eos": False},
    {"prompt_logprobs": 3},
    {"logprobs": 20, "prompt_logprobs": 20},
)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 320, int(rng.integers(1, 60))).tolist() for _ in FEATURES]
    base = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    return prompts, [replace(base, **features) for features in FEATURES]


def logprob_values(answer: Answer) -> np.ndarray[Any, np.dtype[np.float64]]:
    given = [*answer.logprobs, *[x for x in answer.prompt_logprobs or () if x is not None]]
    return np.array([value for one in given for value in (one.logprob, *[p for _, p in one.top])])


@pytest.fixture(scope="module")
def on_one_chip(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Answer]]]:
    """A random model's folder and its answers to all requests on one device, each request alone."""
    found: dict[str, tuple[Path, list[Answer]]] = {}

    def answers(name: str) -> tuple[Path, list[Answer]]:
        if name not in found:
            folder = tiny_llama(tmp_path_factory.mktemp("llama") / "model", **MODELS[name])
            with engine(model=str(folder), tensor_parallel_size=1, **SMALL) as running:
                each = [running.run([p], s)[0] for p, s in zip(*requests(), strict=True)]
            found[name] = folder, each
        return found[name]

    return answers


@pytest.mark.parametrize(("name", "chips"), CASES)
@pytest.mark.parametrize("attention", ["native", pytest.param("xla", marks=pytest.mark.matrix)])
def test_every_feature_gives_on_several_chips_what_it_gives_on_one(
    on_one_chip: Callable[[str], tuple[Path, list[Answer]]], name: str, chips: int, attention: str
) -> None:
    folder, expected = on_one_chip(name)
    with engine(model=str(folder), tensor_parallel_size=chips, attention=attention, **SMALL) as running:
        assert running.info.device.startswith(f"cpu x{chips} (float32")
        answers = running.run(*requests())
    for answer, reference in zip(answers, expected, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (reference.token_ids, reference.finish_reason)
        assert np.abs(logprob_values(answer) - logprob_values(reference)).max(initial=0) < 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("chips", [2, 3, 4, 8])
def test_the_demo_model_writes_the_same_on_any_number_of_chips(chips: int) -> None:
    options = {"max_model_len": 256, "num_blocks": 64, "max_running_seqs": 8, "warmup": False}
    tokenizer = load_tokenizer(EngineConfig.from_args({}))
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    texts = [tokenizer.apply_chat_template(question), "Once upon a time, in a village by the sea,"]
    prompts = [tokenizer.encode(text) for text in texts]
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    logits, answers = {}, {}
    for size in (1, chips):
        with engine(tensor_parallel_size=size, **options) as running:
            logits[size] = prompt_logits(running.backend, prompts[1])
            answers[size] = [answer.token_ids for answer in running.run(prompts, greedy)]
    errors = np.abs(log_softmax(logits[chips], axis=-1) - log_softmax(logits[1], axis=-1))
    # The worst of 600,000 is float32 noise: on one device, XLA and the native kernels differ as much.
    assert np.quantile(errors, 0.999) < 1e-4
    assert errors.max() < 3e-4
    assert answers[chips] == answers[1]
    assert "Paris" in tokenizer.decode(answers[chips][0])


def test_nothing_compiles_after_warm_up_on_two_chips(on_one_chip: Callable[[str], tuple[Path, list[Answer]]]) -> None:
    folder, _ = on_one_chip("2 kv heads for 8")
    with engine(model=str(folder), tensor_parallel_size=2, **{**SMALL, "warmup": True}) as running:
        prompts, sampling = requests()
        running.run(prompts, sampling)
        for prompt, params in zip(prompts, sampling, strict=True):
            running.run([prompt], params)
        assert running.core.metrics().values["compilations_after_warmup"] == 0


def test_more_chips_than_query_heads_are_refused() -> None:
    with pytest.raises(BackendError, match=r"=10 is more than the model's 9 query heads.* any .* from 1 to 9 works"):
        engine(tensor_parallel_size=10).__enter__()
