"""/v1/completions through the official client: kinds of prompts, echo, scores, several choices."""

from __future__ import annotations

import openai
import pytest

from engine.text.tokenizer import Tokenizer
from tests.cluster.ingress.conftest import Solo

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "Once upon a time"


def test_default_is_sixteen_tokens(client: openai.OpenAI, solo: Solo) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == solo(PROMPT, 16)
    assert answer.choices[0].finish_reason == "length"


def test_streams_the_same_text(client: openai.OpenAI, solo: Solo) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == solo(PROMPT, 30)
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_async_client(client: openai.OpenAI, solo: Solo) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as other:
        stream = await other.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == solo(PROMPT, 5)


def test_texts_ids_and_lists_of_both(client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo) -> None:
    texts = ["A red fox", "Two blue birds and a cat"]
    ids = [tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.text for choice in answer.choices] == [solo(text, 5) for text in texts]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=5, temperature=0)
    assert one.choices[0].text == solo(texts[0], 5)


def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI, solo: Solo) -> None:
    answer = client.completions.create(model=MODEL, prompt=["A", "B"], n=2, best_of=2, seed=11, max_tokens=4)
    expected = [solo(prompt, 4, seed=seed) for prompt in "AB" for seed in (11, 12)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(client: openai.OpenAI, solo: Solo, stream: bool) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, stream=stream
    )
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == PROMPT + solo(PROMPT, 4)


def test_logprobs_tell_where_each_token_starts(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 6
    for token, offset, top in zip(scores.tokens, scores.text_offset, scores.top_logprobs, strict=True):
        assert choice.text[offset:].startswith(token)
        assert token in top
        assert len(top) in (3, 4)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, tokenizer: Tokenizer, max_tokens: int) -> None:
    choice = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    ).choices[0]
    scores = choice.logprobs
    num_tokens = len(tokenizer.encode(PROMPT)) + max_tokens
    assert scores is not None
    assert len(scores.tokens) == num_tokens
    assert scores.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in scores.token_logprobs[1:])
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(num_tokens)]


def test_scoring_only_generates_nothing(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_echo_with_logprobs_streams_them(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=0, stream=True
    )
    text, tokens, offsets = "", [], []
    for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert "".join(tokens) == text
    assert offsets == sorted(offsets)


def test_prompt_logprobs_by_token_id(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    scores = answer.choices[0].model_dump()["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == len(ids)
    for token_id, entry in zip(ids[1:], scores[1:], strict=True):
        assert entry[str(token_id)]["logprob"] < 0
        assert entry[str(token_id)]["rank"] == 1


def test_logprobs_stop_where_a_stop_string_cuts(client: openai.OpenAI, solo: Solo) -> None:
    stop = solo(PROMPT, 40)[30:34]
    for stream in (False, True):
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop], logprobs=0, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        offsets = [o for chunk in chunks if (scores := chunk.choices[0].logprobs) for o in scores.text_offset or []]
        assert stop not in text
        assert max(offsets) < len(text)


def test_special_tokens_show_on_request(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    special = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(special) == 1
    forced = {"logit_bias": {}, "echo": True}
    hidden = client.completions.create(model=MODEL, prompt=[1000, *special], max_tokens=1, **forced)
    shown = client.completions.create(
        model=MODEL, prompt=[1000, *special], max_tokens=1, **forced, extra_body={"skip_special_tokens": False}
    )
    assert "<|im_start|>" not in hidden.choices[0].text
    assert "<|im_start|>" in shown.choices[0].text
