"""Log probabilities in the shapes of OpenAI's two routes and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import TokenLogprobs
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON can't say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredToken:
    """A token of the answer or an echoed prompt, where its text starts, and its scores (None: nothing before it)."""

    token_id: int
    offset: int
    scores: TokenLogprobs | None


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        entry(token.token_id, token.scores.logprob)
        | {"top_logprobs": [entry(i, logprob) for i, logprob in token.scores.top[:top]]}
        for token in tokens
        if token.scores is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of text completions; the chosen token is always among the alternatives."""
    alternatives: list[dict[str, float] | None] = []
    for token in tokens:
        if token.scores is None:
            alternatives.append(None)
            continue
        pairs = [*token.scores.top[:top], (token.token_id, token.scores.logprob)]
        alternatives.append({tokenizer.token_text(i): max(logprob, LOWEST) for i, logprob in pairs})
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if t.scores is None else max(t.scores.logprob, LOWEST) for t in tokens],
        "top_logprobs": alternatives,
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per prompt token its own and the most likely ones' scores, by token id."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for item in scores:
        if item is None:
            result.append(None)
            continue
        ranked = {i: (logprob, rank) for rank, (i, logprob) in enumerate(item.top[:top], start=1)}
        ranked.setdefault(item.token_id, (item.logprob, 0))
        result.append(
            {
                str(i): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank or None,
                    "decoded_token": tokenizer.token_text(i),
                }
                for i, (logprob, rank) in ranked.items()
            }
        )
    return result
