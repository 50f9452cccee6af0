"""Streams that are open while something breaks, each with the text that it must have in the end.

The mock backend's tokens are a function of prompt and seed (`mock_tokens`), so a token that is lost, doubled or made
from anything else shows in the text of its stream.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import httpx

from backends.mock.device import mock_tokens
from cluster.ingress.seeds import choice_seed
from engine.config import EngineConfig
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer, load_tokenizer

STREAM_TIMEOUT_S = 180.0
PROMPT_TOKENS = 40


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(EngineConfig(backend="mock"))


def text_of(token_ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer(), True, after_prompt=True)
    return detokenizer.push(token_ids) + detokenizer.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request: greedy without a seed."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    @classmethod
    def drawn(cls, source: random.Random, max_tokens: int) -> Asked:
        return cls(
            prompt=tuple(source.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)),
            max_tokens=max_tokens,
            seed=source.choice((None, source.randrange(1, 2**32))),
            n=source.choice((1, 1, 1, 2)),
            logprobs=source.choice((None, None, 2)),
        )

    def body(self) -> dict[str, object]:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "n": self.n,
            "logprobs": self.logprobs,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }

    def texts(self) -> list[str]:
        seeds = [0 if self.seed is None else choice_seed(self.seed, index) for index in range(self.n)]
        return [text_of(mock_tokens(self.prompt, self.max_tokens, seed=seed)) for seed in seeds]


@dataclass(kw_only=True, slots=True)
class Answer:
    """What a client has got."""

    asked: Asked
    status: int = 0
    retry_after_s: int = 0
    texts: list[str] = field(default_factory=list)
    num_logprobs: Counter[int] = field(default_factory=Counter)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""  # of the API, or how the connection broke
    done: bool = False
    started: float = 0.0
    longest_gap_s: float = 0.0  # between two events

    @property
    def was_refused(self) -> bool:
        """Told to come back, with nothing begun: no engine was there within the time for that."""
        return self.status == 503 and self.retry_after_s > 0

    def problem(self) -> str:
        """What is wrong with it; empty if it is what an undisturbed server would have answered."""
        asked = self.asked
        if self.error or self.status != 200 or not self.done:
            return f"status {self.status}, done: {self.done}, {self.error}"
        if self.texts != asked.texts():
            return f"{asked}: text is {self.texts!r}, not {asked.texts()!r}"
        if set(self.finish_reasons.values()) != {"length"} or len(self.finish_reasons) != asked.n:
            return f"finish reasons {self.finish_reasons}"
        if self.usage["completion_tokens"] != asked.n * asked.max_tokens:
            return f"usage {self.usage}"
        if self.usage["prompt_tokens"] != len(asked.prompt):
            return f"usage {self.usage}"
        if asked.logprobs is not None and set(self.num_logprobs.values()) != {asked.max_tokens}:
            return f"logprobs of {self.num_logprobs} tokens"
        return ""

    def read(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.usage = event.get("usage") or self.usage  # type: ignore[assignment]
        for choice in event["choices"]:  # type: ignore[attr-defined]
            index = choice["index"]
            self.texts[index] += choice["text"]
            if choice["logprobs"]:
                self.num_logprobs[index] += len(choice["logprobs"]["tokens"])
            if choice["finish_reason"]:
                self.finish_reasons[index] = choice["finish_reason"]


async def stream(client: httpx.AsyncClient, url: str, asked: Asked) -> Answer:
    """Sends a request and reads its stream to the end, however that comes."""
    answer = Answer(asked=asked, texts=[""] * asked.n, started=time.monotonic())
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=asked.body()) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                answer.retry_after_s = int(response.headers.get("retry-after", 0))
                return answer
            before = time.monotonic()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                answer.longest_gap_s, before = max(answer.longest_gap_s, now - before), now
                if line == "data: [DONE]":
                    answer.done = True
                else:
                    answer.read(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


class Traffic:
    """A number of streams that are open at any time, until it is told to stop."""

    def __init__(self, client: httpx.AsyncClient, url: str, *, streams: int, max_tokens: int, seed: int) -> None:
        self._client, self._url, self._max_tokens = client, url, max_tokens
        self._random = random.Random(seed)
        self._stopping = False
        self.answers: list[Answer] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(streams)]

    async def _run(self) -> None:
        while not self._stopping:
            asked = Asked.drawn(self._random, self._random.randint(self._max_tokens // 2, self._max_tokens))
            self.answers.append(await stream(self._client, self._url, asked))

    async def stop(self) -> list[Answer]:
        """Lets all streams come to their end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return self.answers

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    async with httpx.AsyncClient(timeout=STREAM_TIMEOUT_S, limits=limits) as client:
        yield client


@asynccontextmanager
async def traffic(url: str, *, streams: int, max_tokens: int, seed: int = 0) -> AsyncIterator[Traffic]:
    async with http_client() as client:
        running = Traffic(client, url, streams=streams, max_tokens=max_tokens, seed=seed)
        try:
            yield running
        finally:
            running.cancel()


def problems(answers: list[Answer]) -> list[str]:
    return [problem for answer in answers if (problem := answer.problem())]
