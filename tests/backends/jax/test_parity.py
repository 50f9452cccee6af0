"""The decoder against transformers: the same prompt log-probabilities, the same greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.backends.jax.engine import Answer, engine, prompt_logits
from tests.backends.models import tiny_llama

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about rain on a tin roof.",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "List the first ten prime numbers.",
    "Translate to German: The weather is nice today.",
    "Explain photosynthesis to a child.",
    "2 + 2 * 3 =",
    "Ünïcödé, 日本語 and emoji 🎉🎊 in one line",
    "Who wrote Hamlet?",
    "Name three uses of a paperclip.",
    "<p>Hello</p> is a piece of",
    "The quick brown fox",
    "Summarize: " + "The committee met on Tuesday and discussed the budget at length. " * 12,
    "SELECT name FROM users WHERE",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "A joke about a programmer:",
    "Write a polite refusal to an invitation.",
    "x",
)


def chat(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def greedy(tokens: int, *, prompt_logprobs: int | None = 0) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=prompt_logprobs)


def assert_equals(reference: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> float:
    """Greedy tokens equal those of the transformers model; returns the largest error of a prompt log-probability."""
    import torch

    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        both = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.inference_mode():
            # One pass over prompt and answer: each token must be the argmax of what comes before it, which is what
            # generating token by token would have chosen.
            logits = reference(both).logits[0].double()
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer.token_ids == expected
        logprobs = torch.log_softmax(logits, -1).numpy()
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        for position, found in enumerate(answer.prompt_logprobs[1:]):
            assert found is not None
            worst = max(worst, abs(found.logprob - logprobs[position, prompt[position + 1]]))
    return worst


def test_demo_model_equals_transformers_over_twenty_prompts(demo_reference: Any) -> None:
    options = {"max_model_len": 512, "num_blocks": 400, "max_running_seqs": 32, "warmup": False}
    tokenizer = load_tokenizer(EngineConfig.from_args({}))
    prompts = [tokenizer.encode(chat(tokenizer, text) if i % 2 else text) for i, text in enumerate(PROMPTS)]
    with engine(**options) as running:
        answers = running.run(prompts, greedy(64))
    assert [len(a.token_ids) for a in answers] == [64] * len(PROMPTS)
    assert assert_equals(demo_reference, prompts, answers) < 1e-3


def test_demo_logits_equal_transformers_over_the_whole_vocabulary(demo_reference: Any) -> None:
    import torch

    prompt = load_tokenizer(EngineConfig.from_args({})).encode("The capital of France is Paris. The capital of Spain")
    with engine(max_model_len=128, num_blocks=8, max_running_seqs=8, warmup=False) as running:
        logits = prompt_logits(running.backend, prompt)
    with torch.inference_mode():
        expected = demo_reference(torch.tensor([prompt])).logits[0].numpy()
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < 1e-3


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "a kv head for each head": {"num_heads": 4, "num_kv_heads": 4},
    "one kv head, tied": {"num_heads": 4, "num_kv_heads": 1, "tie": True},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "linear rope": {"rope_scaling": LINEAR},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sliding window": {"sliding_window": 24},
    "heads wider than hidden / heads": {"head_dim": 48},
}


SEEN_BY_ATTENTION = ("one kv head, tied", "sliding window", "heads wider than hidden / heads")
CASES = [
    pytest.param(variant, attention, marks=[] if is_short else pytest.mark.matrix, id=f"{variant}-{attention}")
    for variant in VARIANTS
    for attention, is_short in (("native", True), ("xla", variant in SEEN_BY_ATTENTION))
]


@pytest.mark.parametrize(("variant", "attention"), CASES)
def test_random_llamas_equal_transformers(tmp_path: Path, variant: str, attention: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path / "model", **VARIANTS[variant])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 320, length).tolist() for length in (1, 7, 33, 100)]
    with engine(
        model=str(folder),
        attention=attention,
        num_blocks=64,
        block_size=8,
        max_running_seqs=8,
        max_num_batched_tokens=48,
        decode_blocks_padding=32,
        warmup=False,
    ) as running:
        answers = running.run(prompts, greedy(24))
    assert assert_equals(reference, prompts, answers) < 1e-3


def test_a_bfloat16_model_stays_close_to_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path / "model", dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = np.random.default_rng(0).integers(3, 320, 60).tolist()
    with engine(model=str(folder), dtype="bfloat16", num_blocks=32, max_running_seqs=8, warmup=False) as running:
        (answer,) = running.run([prompt], greedy(1))
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1).numpy()
    assert answer.prompt_logprobs is not None
    errors = [
        abs(found.logprob - logprobs[i, prompt[i + 1]])
        for i, found in enumerate(answer.prompt_logprobs[1:])
        if found is not None
    ]
    assert max(errors) < 0.05  # weights are exact; keys and values lose all but 8 bits
