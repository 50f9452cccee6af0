"""From request fields to SamplingParams; the engine (engine/validation.py) has the last word on them."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.ingress.errors import invalid
from cluster.ingress.protocol.base import SamplingFields
from engine.backend import BackendInfo
from engine.request import SamplingParams
from engine.text.tokenizer import TextError, Tokenizer

COLDEST = 1e-5
"""Below this temperature the most likely token is taken: logits divided by less overflow. As in vLLM."""
SPELLINGS = 2
"""Token sequences that a bad word may take: at the start of a text, and after a space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one model on one kind of hardware can take, and the tokenizer to read words with."""

    info: BackendInfo
    tokenizer: Tokenizer

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len


def sampling_params(
    fields: SamplingFields,
    limits: Limits,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling of a request's first choice; others differ in the seed.

    Raises:
        ApiError: 400 naming the parameter.
    """
    if fields.seed is not None and not limits.info.capabilities.per_request_seed:
        raise invalid("seed", f"not supported on {limits.info.device}; leave it out")
    if fields.min_tokens > max_tokens:
        raise invalid("min_tokens", f"is more than max_tokens ({max_tokens})")
    only_the_best = fields.top_p == 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if fields.temperature < COLDEST else fields.temperature,
        top_k=1 if only_the_best else max(fields.top_k, 0),
        top_p=1.0 if only_the_best else fields.top_p,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_logit_bias(fields.logit_bias),
        bad_words=_bad_words(fields.bad_words, limits),
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids)),
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 12 for key in bias):
        raise invalid("logit_bias", "keys must be token ids")
    return {int(key): value for key, value in bias.items()}


def _bad_words(words: list[str], limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word. Backends limit sequences; clients are told about words."""
    able = limits.info.capabilities
    most = able.bad_words // SPELLINGS
    if words and not most:
        raise invalid("bad_words", f"not supported on {limits.info.device}; leave it out")
    if len(words) > most:
        raise invalid("bad_words", f"has {len(words)} words; at most {most} are supported")
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        try:
            spellings = limits.tokenizer.bad_word_ids([word])
        except TextError as error:
            raise invalid(f"bad_words[{index}]", str(error)) from None
        longest = max(map(len, spellings))
        if longest > able.bad_word_tokens:
            raise invalid(f"bad_words[{index}]", f"has {longest} tokens; {able.bad_word_tokens} is the most for a word")
        sequences.update(dict.fromkeys(spellings))
    return tuple(sequences)
