"""Requests as the engine sees them, and what they yield: token ids in, token ids out, no text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_TOP_LOGPROBS = 20
"""Most alternatives per position that a request may ask for (OpenAI's limit)."""


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or stop token, or a stop string found by the ingress
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the client went away
    TIMEOUT = "timeout"  # request_timeout_s passed; RequestOutput.error says so
    ERROR = "error"  # the engine failed; RequestOutput.error says how


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token of a request is chosen. Ranges are checked at the ingress; see docs/configuration.md.

    The random key of the token at position `p` is `fold_in(key(seed), p)`: the same seed gives the same tokens whatever
    else is in the batch, and on another replica.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    min_tokens: int = 0  # end-of-sequence and stop ids are banned until then
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # unsigned 64-bit; the ingress draws one when the client gives none
    logprobs: int | None = None  # None = none; k = the chosen token's and the k most likely ones'
    prompt_logprobs: int | None = None

    @property
    def rewrites_logits(self) -> bool:
        """Whether the logits stage (penalties, bias, bans) has anything to do for this request."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One sequence to continue. A request for `n` choices is `n` of these."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens that another replica already generated (they count against max_tokens and are not emitted again)."""
    cache_salt: str = ""
    """Keeps the prefix cache of one tenant apart from another's."""
    export_from: int | None = None
    """Hand out the KV of prompt and known output tokens from this one on, as it is computed (for a decode replica)."""
    arrival_time: float = field(default_factory=time.time)  # seconds since the epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities from the raw logits (before temperature, penalties and bans) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one engine step yields for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new ones only; a final stop token is included
    logprobs: tuple[TokenLogprobs, ...] | None = None  # aligned with token_ids, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first token; [0] is None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, when one did
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache (constant over the request)
    error: str | None = None
