"""The demo model behind the real command line, Ray Serve and HTTP, spoken to by the official OpenAI client."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import demo_server

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--dtype=float32", "--max_running_seqs=16", "--max_model_len=1024", "--num_blocks=512")
    with demo_server(tmp_path_factory.mktemp("server") / "log", *options) as url:
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"{name} is not exported"
    return sum(map(float, values))


def wait_for_running(url: str, count: int) -> None:
    deadline = time.monotonic() + 15
    while metric(url, "vllm:num_requests_running") != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_stream_is_the_same_text_with_usage_at_the_end(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_the_async_client_runs_many_at_once(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)

    async def one(seed: int) -> str:
        answer = await client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0.8, seed=seed
        )
        return answer.choices[0].text

    first = await asyncio.gather(*(one(seed) for seed in range(24)))
    again = [await one(seed) for seed in range(0, 24, 8)]
    assert again == first[::8]  # a seed's text does not depend on the company
    assert len(set(first)) > 12
    await client.close()


def test_a_repeated_prompt_starts_in_a_third_of_the_time(client: openai.OpenAI) -> None:
    prompt = [random.Random(7).randrange(100, 40000) for _ in range(600)]

    def once() -> tuple[float, Any]:
        started, first, usage = time.perf_counter(), 0.0, None
        for chunk in client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ):
            first = first or time.perf_counter() - started
            usage = chunk.usage or usage
        return first, usage

    cold, cold_usage = once()
    warm, warm_usage = min((once() for _ in range(3)), key=lambda pair: pair[0])
    assert cold_usage.prompt_tokens_details.cached_tokens == 0
    assert warm_usage.prompt_tokens_details.cached_tokens == 576  # 18 blocks of 32
    assert warm < cold / 3


def test_echo_gives_the_prompts_own_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, echo=True, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text == "The capital of France is Paris"
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_logit_bias_and_bad_words_change_the_answer(client: openai.OpenAI) -> None:
    banned = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=12,
        extra_body={"bad_words": ["Paris"]},
    )
    assert "Paris" not in (banned.choices[0].message.content or "")
    forced = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=3,
        logit_bias={"28": 100},
    )
    assert forced.choices[0].message.content == ",,,"


def test_a_client_that_leaves_frees_its_place(url: str) -> None:
    body = {"prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        chunks = response.iter_text()  # the client leaves when this is dropped
        next(chunks)
        wait_for_running(url, 1)
    wait_for_running(url, 0)


def test_mixed_load_compiles_nothing(url: str) -> None:
    rng = random.Random(3)
    errors: list[str] = []

    def one(length: int, tokens: int) -> None:
        body = {"prompt": [rng.randrange(100, 40000) for _ in range(length)], "max_tokens": tokens}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        if response.status_code != 200:
            errors.append(response.text)

    threads = [threading.Thread(target=one, args=(rng.randint(1, 400), rng.randint(1, 20))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert not errors
    assert metric(url, "sliceserve_compilations_after_warmup_total") == 0


def test_vertex_and_probes_answer(url: str) -> None:
    body = {"instances": [{"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}]}
    predictions = httpx.post(f"{url}/generate", json=body, timeout=60).json()["predictions"]
    assert "Paris" in predictions[0]
    assert httpx.get(f"{url}/ping", timeout=10).status_code == 200
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
