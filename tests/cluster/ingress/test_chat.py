"""/v1/chat/completions through the official client, whole and streamed."""

from __future__ import annotations

import openai
import pytest

from engine.text.tokenizer import Tokenizer
from tests.cluster.apps import eventually
from tests.cluster.ingress.conftest import Solo
from tests.cluster.ingress.local_client import LocalServer

MODEL = "SmolLM2-135M-Instruct"
HELLO = [{"role": "user", "content": "Hello there"}]


def prompt_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_answers_with_the_models_text_and_exact_usage(client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo) -> None:
    ids = prompt_ids(tokenizer, HELLO)
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content == solo(ids, 20)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 20)
    assert answer.usage.total_tokens == len(ids) + 20


def test_streams_the_same_text_with_role_first_and_usage_last(
    client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo
) -> None:
    ids = prompt_ids(tokenizer, HELLO)
    stream = client.chat.completions.create(
        model="", messages=HELLO, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == solo(ids, 20)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


async def test_async_client_streams_and_does_not(server: LocalServer, tokenizer: Tokenizer, solo: Solo) -> None:
    text = solo(prompt_ids(tokenizer, HELLO), 8)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=8, temperature=0
        )
        assert whole.choices[0].message.content == text
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text


def test_default_limit_is_what_the_context_leaves(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_n_choices_differ_by_seed_and_repeat(client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo) -> None:
    ids = prompt_ids(tokenizer, HELLO)
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=3, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [solo(ids, 6, seed=seed) for seed in (7, 8, 9)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 18)


def test_n_choices_stream_interleaved(client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo) -> None:
    ids = prompt_ids(tokenizer, HELLO)
    texts, finished, roles = ["", "", ""], [], []
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, n=3, seed=-5, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == [solo(ids, 9, seed=2**64 - 5 + i) for i in range(3)]
    assert sorted(finished) == sorted(roles) == [0, 1, 2]


def test_a_seed_fixes_the_text_and_no_seed_varies_it(client: openai.OpenAI) -> None:
    def text(**more: object) -> str | None:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, **more)
        return answer.choices[0].message.content

    assert text(seed=3) == text(seed=3) != text(seed=4)
    assert text() != text()


def test_logprobs_have_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert "".join(item.token for item in logprobs.content) == answer.choices[0].message.content
    for item in logprobs.content:
        assert item.logprob == pytest.approx(-0.6931, abs=1e-3)
        assert item.bytes == list(item.token.encode())
        assert item.top_logprobs[0].token == item.token
        assert len(item.top_logprobs) == 2


def test_logprobs_stream_with_the_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, stream=True
    )
    text, tokens = "", []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            tokens += [item.token for item in chunk.choices[0].logprobs.content or []]
    assert len(tokens) == 5
    assert "".join(tokens) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_before_or_behind_it(
    client: openai.OpenAI, server: LocalServer, tokenizer: Tokenizer, solo: Solo, stream: bool, include: bool
) -> None:
    text = solo(prompt_ids(tokenizer, HELLO), 64)
    stop = text[40:46]
    end = text.index(stop)
    before = list(server.client.aborted)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    if stream:
        chunks = list(answer)
        got = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        got, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert got == text[: end + len(stop) if include else end]
    assert reason == "stop"
    assert server.client.aborted == before  # it has stopped
    eventually(lambda: server.client.core.metrics().values["num_requests_running"] == 0)


def test_a_stop_token_ends_the_text_without_being_in_it(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    from backends.mock import mock_tokens

    ids = mock_tokens(prompt_ids(tokenizer, HELLO), 12)
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=12, extra_body={"stop_token_ids": [ids[9]]}
    )
    assert answer.choices[0].message.content == tokenizer.decode(ids[:9])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_continuous_usage_counts_along(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 5


def test_a_repeated_prompt_reports_cached_tokens(client: openai.OpenAI, server: LocalServer) -> None:
    messages = [{"role": "user", "content": "One two three four five. " * 40}]
    first, second = (
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).usage for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens > 0
    assert second.prompt_tokens_details.cached_tokens % server.config.block_size == 0


def test_a_cache_salt_keeps_caches_apart(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Six seven eight nine ten. " * 40}]

    def cached(salt: str) -> int | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_messages_may_be_parts_developer_and_an_answer_to_continue(
    client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo
) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it"}]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content == solo(prompt_ids(tokenizer, plain), 4)
    begun = [*plain, {"role": "assistant", "content": "It is"}]
    text = tokenizer.apply_chat_template(begun, add_generation_prompt=False, continue_final_message=True)
    continued = client.chat.completions.create(
        model=MODEL, messages=begun, max_tokens=4, temperature=0, extra_body={"continue_final_message": True}
    )
    assert continued.choices[0].message.content == solo(tokenizer.encode(text, add_special_tokens=False), 4)


def test_a_message_of_this_server_can_be_sent_back(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4).choices[0].message
    history = [*HELLO, message.model_dump(), {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=4).choices[0].message.content


def test_labels_and_neutral_values_change_nothing(client: openai.OpenAI, tokenizer: Tokenizer, solo: Solo) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4,
        temperature=0,
        user="someone",
        metadata={"team": "a"},
        store=False,
        service_tier="auto",
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        logit_bias={},
        presence_penalty=None,
    )
    assert answer.choices[0].message.content == solo(prompt_ids(tokenizer, HELLO), 4)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
