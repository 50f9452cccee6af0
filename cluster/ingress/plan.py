"""What an HTTP request asks of the engine: a Job of one or more Choices, each one engine request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.ingress.errors import invalid
from cluster.ingress.sampling import Limits
from cluster.ingress.seeds import choice_seed
from engine.request import EngineRequest, SamplingParams
from engine.validation import validate

MAX_SEQUENCES = 1024
"""Most sequences (prompts times n) of one HTTP request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str = ""  # what echo repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How token ids become the answer's text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    continues_text: bool = False  # the answer goes on where a text ended: a space at its beginning belongs to it
    scores_only: bool = False  # max_tokens=0: the prompt is scored, the one token the engine must generate is dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    index: int
    prompt: Prompt
    request: EngineRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: str
    model: str
    choices: tuple[Choice, ...]
    choices_per_prompt: int
    text: TextOptions
    session: str = ""  # requests of one session go to the same replica; empty: wherever it suits
    prompt_logprobs: int | None = None  # to be shown as such, apart from an echo's
    include_usage: bool = False
    continuous_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it has."""
        return sum(len(c.prompt.token_ids) for c in self.choices[:: self.choices_per_prompt])


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def check_text_length(param: str, num_characters: int, limits: Limits) -> None:
    """Refuses, before it is tokenized, a text that can't fit however few tokens it takes: megabytes take half a minute.

    Raises:
        ApiError: 400 stating both lengths.
    """
    most = limits.max_model_len * limits.tokenizer.longest_token
    if num_characters > most:
        raise invalid(
            param,
            f"has {num_characters} characters, but at most {most} fit max_model_len ({limits.max_model_len} tokens)",
        )


def check_prompt_length(param: str, num_tokens: int, limits: Limits) -> None:
    """Refuses prompts that are empty or leave no room for a token.

    Raises:
        ApiError: 400 stating both lengths.
    """
    if num_tokens == 0:
        raise invalid(param, "has no tokens")
    if num_tokens >= limits.max_model_len:
        raise invalid(
            param,
            f"has {num_tokens} tokens, but max_model_len is {limits.max_model_len} for prompt and answer together",
        )


def resolve_max_tokens(asked: int | None, num_prompt_tokens: int, limits: Limits) -> int:
    """The answer's limit: what was asked for, or what the prompt leaves of the context.

    Raises:
        ApiError: 400 when prompt and answer don't fit together.
    """
    room = limits.max_model_len - num_prompt_tokens
    if asked is None:
        return room
    if asked > room:
        shown = asked if asked < 10**12 else "the number given"
        lengths = f"{shown} and the prompt's {num_prompt_tokens} tokens exceed max_model_len ({limits.max_model_len})"
        raise invalid("max_tokens", f"{lengths}; {room} is the most")
    return asked


def plan_choices(
    job_id: str,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    n: int,
    cache_salt: str | None,
    limits: Limits,
) -> tuple[Choice, ...]:
    """n choices per prompt, numbered prompt by prompt; `samplings` belong to the prompts.

    Raises:
        ApiError: 400 when that is more than MAX_SEQUENCES.
        InvalidRequestError: the engine would refuse it; better said before anything is sent.
    """
    if len(prompts) * n > MAX_SEQUENCES:
        raise invalid("n", f"{n} choices of {len(prompts)} prompts are more than {MAX_SEQUENCES} sequences")
    choices: list[Choice] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        for i in range(n):
            index = len(choices)
            request = EngineRequest(
                request_id=f"{job_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(sampling, seed=choice_seed(sampling.seed, i)) if i else sampling,
                cache_salt=cache_salt or "",
            )
            if i == 0:
                validate(request, limits.info, longest_prompt=None)
            choices.append(Choice(index=index, prompt=prompt, request=request))
    return tuple(choices)
