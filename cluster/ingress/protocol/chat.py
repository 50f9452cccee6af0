"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from cluster.ingress.body import validate
from cluster.ingress.errors import invalid
from cluster.ingress.protocol import unavailable
from cluster.ingress.protocol.base import CompletionFields, Int, StrictModel, at_most
from engine.request import MAX_TOP_LOGPROBS

MAX_MESSAGES = 4096
NOT_FOR_TEMPLATES = {
    "add_generation_prompt": "is a parameter of its own",
    "continue_final_message": "is a parameter of its own",
    "tools": "is a parameter of its own",
    "chat_template": "is the server's to choose",
    "tokenize": "is no variable of templates",
}


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(StrictModel):
    """One message. `developer` is OpenAI's newer name of `system` and reaches the template as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: str | None = None

    @model_validator(mode="after")
    def _only_assistants_say_nothing(self) -> Self:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": "".join(part.text for part in self.content)}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(CompletionFields):
    messages: Annotated[list[Message], Field(min_length=1), at_most(MAX_MESSAGES)]
    max_tokens: Int | None = Field(None, ge=1)
    max_completion_tokens: Int | None = Field(None, ge=1)  # OpenAI's newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = False  # templates write them already
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise invalid("add_generation_prompt", "can't be combined with continue_final_message")
            self.add_generation_prompt = False
        for name, reason in NOT_FOR_TEMPLATES.items():
            if name in self.chat_template_kwargs:
                raise invalid("chat_template_kwargs", f"{name} {reason}")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise invalid("continue_final_message", "needs an assistant message at the end")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Raises ApiError (400) naming the first parameter that is wrong, unknown or unavailable."""
    kept = unavailable.drop_neutral(body, unavailable.CHAT)
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [
            unavailable.drop_neutral(m, unavailable.MESSAGE, f"messages[{i}].") if isinstance(m, dict) else m
            for i, m in enumerate(messages)
        ]
    return validate(ChatRequest, kept)
