"""Many requests at once: each gets exactly what it would have got alone."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.cluster.ingress.conftest import Solo
from tests.cluster.ingress.local_client import LocalServer

MODEL = "SmolLM2-135M-Instruct"
NUM_REQUESTS = 64


async def test_64_mixed_requests_get_their_solo_texts(server: LocalServer, solo: Solo) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def ask(i: int) -> tuple[str, str]:
            prompt, count = f"Request {i}: " + "word " * (i * 7 % 90), 20 + i * 5 % 70
            sampled = i % 3 == 0
            options = {"temperature": 1.0, "seed": 100 + i} if sampled else {"temperature": 0.0}
            text = solo(prompt, count, seed=100 + i if sampled else 0)
            if i % 4 == 0:
                answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=count, **options)
                return answer.choices[0].text, text
            stop = text[len(text) // 2 :][:5] if i % 5 == 0 else None
            expected = text[: text.index(stop)] if stop else text
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=count, stop=stop, stream=True, **options
            )
            return "".join([chunk.choices[0].text async for chunk in stream]), expected

        results = await asyncio.gather(*(ask(i) for i in range(NUM_REQUESTS)))
    assert [got for got, _ in results] == [expected for _, expected in results]


@pytest.mark.parametrize("prompt", ["Some words and 123 numbers. " * 60_000, ["Some words and 12. " * 100] * 800])
async def test_long_prompts_do_not_stall_running_streams(server: LocalServer, prompt: str | list[str]) -> None:
    """They take the tokenizer longer than any pause that a stream may show, whether it is one text or many."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        loop = asyncio.get_running_loop()
        refused = asyncio.ensure_future(
            client.completions.create(model=MODEL, prompt=prompt, n=2)  # refused: too long, or too many sequences
        )
        pauses = []
        while not refused.done():
            before = loop.time()
            await client.models.list()
            pauses.append(loop.time() - before)
        assert isinstance(refused.exception(), openai.BadRequestError)
        # However few there are, as a refusal may come at once: a server that stalls shows one that is long.
        assert sorted(pauses)[len(pauses) // 2] < 0.1
