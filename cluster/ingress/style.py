"""What differs between the answers of the two OpenAI routes: names, the shape of a choice, the shape of logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cluster.ingress.generation import Answer, Usage
from cluster.ingress.logprobs import ScoredToken, chat_logprobs, completion_logprobs, prompt_logprobs
from cluster.ingress.plan import Job
from engine.text.tokenizer import Tokenizer


class Style(Protocol):
    """One route's dialect. Chunk pieces are JSON source: `open + <JSON string> + close` is one streamed delta."""

    id_prefix: str
    object: str
    chunk_object: str
    chunk_open: str
    chunk_close: str
    chunk_empty: str  # a delta that adds no text
    chunk_first: str | None  # a delta that comes before all others

    def choice(self, answer: Answer) -> dict[str, Any]: ...

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ScoredToken], top: int) -> dict[str, Any]: ...


class ChatStyle:
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    chunk_open = '"delta":{"content":'
    chunk_close = "}"
    chunk_empty = '"delta":{}'
    chunk_first: str | None = '"delta":{"role":"assistant","content":""}'

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": answer.text, "refusal": None}}

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ScoredToken], top: int) -> dict[str, Any]:
        return chat_logprobs(tokenizer, tokens, top)


class CompletionStyle:
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    chunk_open = '"text":'
    chunk_close = ""
    chunk_empty = '"text":""'
    chunk_first: str | None = None

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[ScoredToken], top: int) -> dict[str, Any]:
        return completion_logprobs(tokenizer, tokens, top)


CHAT: Style = ChatStyle()
COMPLETION: Style = CompletionStyle()


def document(job: Job, style: Style, tokenizer: Tokenizer, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
    """The whole answer as one JSON document."""
    choices = []
    for choice, answer in zip(job.choices, answers, strict=True):
        sampling = choice.request.sampling
        body: dict[str, Any] = {"index": choice.index, **style.choice(answer)}
        body["logprobs"] = (
            None if sampling.logprobs is None else style.logprobs(tokenizer, answer.scored, sampling.logprobs)
        )
        body["finish_reason"] = answer.finish_reason
        if answer.prompt_scores is not None and job.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(tokenizer, answer.prompt_scores, job.prompt_logprobs)
        choices.append(body)
    return {
        "id": job.id,
        "object": style.object,
        "created": job.created,
        "model": job.model,
        "choices": choices,
        "usage": usage.body(),
    }
