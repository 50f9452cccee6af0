"""The request of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from cluster.ingress.body import validate
from cluster.ingress.errors import invalid
from cluster.ingress.protocol import unavailable
from cluster.ingress.protocol.base import CompletionFields, Int
from engine.request import MAX_TOP_LOGPROBS

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""
MAX_PROMPTS = 1024


def _as_prompts(value: Any) -> list[str] | list[list[int]]:
    """A text, texts, token ids or lists of them, as a list of prompts. By hand: a pydantic union would report every
    member of a long list under every alternative."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"has {len(value)} prompts; {MAX_PROMPTS} is the most for one request")
        if all(isinstance(item, str) for item in value) or all(
            isinstance(item, list) and _are_ids(item) for item in value
        ):
            return value
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists, and not empty")


def _are_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int for item in items)


class CompletionRequest(CompletionFields):
    prompt: Annotated[
        Any, BeforeValidator(_as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    ]
    max_tokens: Int = Field(DEFAULT_MAX_TOKENS, ge=0)  # 0 with echo only: score the prompt
    best_of: Int | None = None
    echo: bool = False
    logprobs: Int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise invalid("best_of", "must equal n: candidates are not ranked")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens", "0 is allowed with echo or prompt_logprobs only")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompts: list[str] | list[list[int]] = self.prompt
        return prompts


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError (400) naming the first parameter that is wrong, unknown or unavailable."""
    return validate(CompletionRequest, unavailable.drop_neutral(body, unavailable.COMPLETION))
