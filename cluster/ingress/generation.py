"""Running a Job: its engine requests side by side, their deltas as they come, everything closed when anybody stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from cluster.client import EngineClient
from cluster.ingress.choice import ChoiceText, Delta
from cluster.ingress.errors import engine_cut_off, engine_failed
from cluster.ingress.logprobs import ScoredToken
from cluster.ingress.plan import Choice, Job
from engine.request import FinishReason, TokenLogprobs
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Where jobs run."""

    client: EngineClient
    tokenizer: Tokenizer

    def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """The job's deltas in the order they arrive, until every choice has a finish_reason. Closing aborts all of it.

        Raises:
            ApiError: the engine ended a choice with an error.
            TimeoutError: the engine ended it because its time was up.
            EngineOverloadedError, EngineUnavailableError, InvalidRequestError: the engine refused a choice.
        """
        if len(job.choices) == 1:
            return self._one(job, job.choices[0])
        return self._all(job)

    async def _one(self, job: Job, choice: Choice) -> AsyncGenerator[Delta, None]:
        text = ChoiceText(self.tokenizer, choice, job.text)
        async with aclosing(self.client.generate(choice.request, session=job.session)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.TIMEOUT:
                    raise TimeoutError
                if output.finish_reason is FinishReason.ERROR:
                    raise engine_failed(output.error)
                if output.finish_reason is FinishReason.ABORT:
                    raise engine_cut_off()
                delta = text.push(output)
                if delta.finish_reason is not None and output.finish_reason is None:
                    with suppress(StopAsyncIteration):
                        await outputs.asend(True)  # a stop string, of which the engine does not know
                yield delta
                if delta.finish_reason is not None:
                    return
        raise engine_cut_off()

    async def _all(self, job: Job) -> AsyncGenerator[Delta, None]:
        arrived: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(job, choice, arrived)) for choice in job.choices]
        try:
            open_choices = len(tasks)
            while open_choices:
                delta = await arrived.get()
                if isinstance(delta, BaseException):
                    raise delta
                open_choices -= delta.finish_reason is not None
                yield delta
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, job: Job, choice: Choice, arrived: asyncio.Queue[Delta | BaseException]) -> None:
        try:
            async with aclosing(self._one(job, choice)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait(delta)
        except Exception as error:
            arrived.put_nowait(error)


@dataclass(slots=True)
class Usage:
    """Counts tokens while deltas pass."""

    prompt_tokens: int
    choices_per_prompt: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by index of the prompt's first choice

    @classmethod
    def of(cls, job: Job) -> Usage:
        return cls(prompt_tokens=job.prompt_tokens, choices_per_prompt=job.choices_per_prompt)

    def count(self, delta: Delta) -> None:
        self.completion_tokens += delta.num_tokens
        if delta.num_cached_tokens and delta.index % self.choices_per_prompt == 0:
            self.cached[delta.index] = delta.num_cached_tokens

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(slots=True)
class Answer:
    """One choice, complete."""

    text: str = ""
    finish_reason: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_scores: tuple[TokenLogprobs | None, ...] | None = None


async def collect(deltas: AsyncIterator[Delta], job: Job) -> tuple[list[Answer], Usage]:
    """Waits for all of a job's choices."""
    answers = [Answer() for _ in job.choices]
    pieces: list[list[str]] = [[] for _ in job.choices]
    usage = Usage.of(job)
    async for delta in deltas:
        usage.count(delta)
        pieces[delta.index].append(delta.text)
        answer = answers[delta.index]
        answer.scored.extend(delta.scored)
        answer.prompt_scores = delta.prompt_scores or answer.prompt_scores
        answer.finish_reason = delta.finish_reason or answer.finish_reason
    for answer, texts in zip(answers, pieces, strict=True):
        answer.text = "".join(texts)
    return answers, usage
