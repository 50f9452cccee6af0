"""Fields that chat and text completions share: sampling, stopping, streaming, and labels."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.ingress.errors import invalid
from engine.request import MAX_TOP_LOGPROBS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STRING = 4096
MAX_ENTRIES = 4096
"""Of lists and objects that have no limit of their own (the model's, which may be lower, is the engine's to check)."""
MAX_BAD_WORD = 128  # characters; backends take a few tokens
UINT64 = 1 << 64


def _whole_float(value: Any) -> Any:
    """Protobuf-based clients (Vertex AI) turn every number into a float: 16.0 is meant as 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def at_most(count: int) -> BeforeValidator:
    """Refuses longer lists and objects before their items are validated: each wrong one would become an error."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; {count} is the most")
        return value

    return BeforeValidator(check)


Int = Annotated[int, BeforeValidator(_whole_float)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD)]
ShortString = Annotated[str, Field(min_length=1, max_length=MAX_STRING)]


class StrictModel(BaseModel):
    """Refuses unknown fields, strings for numbers, booleans for numbers, NaN and infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        """Clients write null for "default", so a null field falls back to its default.

        Of unknown fields the first is kept: it is enough for a refusal, and a million would become a million errors.
        """
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        unknown = next((name for name, item in value.items() if item is not None and name not in known), None)
        return {name: item for name, item in value.items() if item is not None and (name in known or name == unknown)}


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(StrictModel):
    """How tokens are chosen and where the answer ends. Unset means the default of engine.request.SamplingParams."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)  # 0 keeps the most likely token alone
    top_k: Int = Field(0, ge=-1, lt=1 << 31)  # 0 and -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], at_most(MAX_ENTRIES)] = Field(default_factory=dict)
    bad_words: Annotated[list[BadWord], at_most(MAX_ENTRIES)] = Field(default_factory=list)
    min_tokens: Int = Field(0, ge=0)
    ignore_eos: bool = False
    stop: Annotated[list[ShortString], at_most(MAX_STOP_STRINGS), BeforeValidator(_as_list)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[Int], at_most(MAX_ENTRIES)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: Int | None = Field(None, ge=-(UINT64 >> 1), lt=UINT64)


class CompletionFields(SamplingFields):
    """What both OpenAI routes take beyond sampling."""

    model: str = ""  # empty: the served one
    n: Int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    cache_salt: ShortString | None = None

    # With sticky_sessions, these name the session (see Service); without it, they have no effect.
    prompt_cache_key: str | None = None
    user: str | None = None

    # Labels for the client's own bookkeeping: they have no effect by definition.
    safety_identifier: str | None = None
    metadata: Annotated[dict[str, str] | None, at_most(MAX_ENTRIES)] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "not available with stream=true; use echo and logprobs")
        return self
