"""What a request must satisfy for the engine to take it: the model's limits and the backend's capabilities.

Ranges that don't depend on the model (temperature, top_p, …) are the ingress's to check. Everything that could make a
step fail is checked here, because a failing step ends all requests.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.backend import BackendInfo
from engine.request import MAX_TOP_LOGPROBS, EngineRequest, SamplingParams

_INT32_MAX = 2**31 - 1


class InvalidRequestError(ValueError):
    """The request can't be served by this engine. `field` names the API parameter, the message is one line."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def validate(request: EngineRequest, info: BackendInfo, *, longest_prompt: int | None) -> None:
    """Checks a request against the loaded model.

    Args:
        longest_prompt: longest prompt that one step takes, when prompts can't be split; else None.

    Raises:
        InvalidRequestError: it can't be served.
    """
    _check_prompt(request, info, longest_prompt)
    _check_ids("prompt", request.prompt_token_ids, info)
    _check_ids("prompt", request.output_token_ids, info)
    _check_numbers(request.sampling)
    _check_logits_stage(request.sampling, info)
    _check_logprobs(request.sampling, info)


def _check_prompt(request: EngineRequest, info: BackendInfo, longest_prompt: int | None) -> None:
    length = len(request.prompt_token_ids)
    if not length:
        raise InvalidRequestError("prompt", "the prompt has no tokens: send at least one")
    # A sequence's last token is sampled and never cached: max_model_len may be one more than the blocks hold.
    longest = min(info.max_model_len - (1 if request.sampling.max_tokens else 0), info.num_blocks * info.block_size)
    if length > longest:
        raise InvalidRequestError(
            "prompt",
            f"the prompt has {length} tokens, but at most {longest} fit a context of {info.max_model_len}: "
            "shorten it, or serve with a larger max_model_len (and num_blocks)",
        )
    if longest_prompt is not None and length > longest_prompt:
        raise InvalidRequestError(
            "prompt",
            f"the prompt has {length} tokens, but at most {longest_prompt} fit one step and prompts are not split: "
            "shorten it, or serve with enable_chunked_prefill=true or a larger max_num_batched_tokens",
        )


def _check_ids(field: str, ids: Collection[int], info: BackendInfo) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < info.vocab_size)
        raise InvalidRequestError(field, f"{field}: token id {wrong} is not in the vocabulary of {info.vocab_size}")


def _check_numbers(sampling: SamplingParams) -> None:
    for field, value in (
        ("max_tokens", sampling.max_tokens),
        ("min_tokens", sampling.min_tokens),
        ("top_k", sampling.top_k),
    ):
        if not 0 <= value <= _INT32_MAX:
            raise InvalidRequestError(field, f"{field}={value}: use 0 to {_INT32_MAX}")
    if not 0 <= sampling.seed < 2**64:
        raise InvalidRequestError("seed", f"seed={sampling.seed}: use an unsigned 64-bit number")


def _check_logits_stage(sampling: SamplingParams, info: BackendInfo) -> None:
    able = info.capabilities
    penalties = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
    }
    for field, asked in penalties.items():
        if asked and not able.penalties:
            raise InvalidRequestError(field, f"{field} is not supported on {info.device}: leave it out")
    if sampling.min_p and not able.min_p:
        raise InvalidRequestError("min_p", f"min_p is not supported on {info.device}: leave it out")
    _check_count("logit_bias", len(sampling.logit_bias), able.logit_bias, "entries")
    _check_ids("logit_bias", sampling.logit_bias, info)
    _check_count("bad_words", len(sampling.bad_words), able.bad_words, "sequences")
    for word in sampling.bad_words:
        _check_count("bad_words", len(word), able.bad_word_tokens, "tokens per sequence")
        _check_ids("bad_words", word, info)
    _check_ids("stop_token_ids", sampling.stop_token_ids, info)
    if sampling.min_tokens:
        _check_count(
            "stop_token_ids", len({*sampling.stop_token_ids, *info.eos_token_ids}), able.stop_ids, "ids with min_tokens"
        )


def _check_count(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequestError(field, f"{field} has {count} {what}, at most {most} are supported: send fewer")


def _check_logprobs(sampling: SamplingParams, info: BackendInfo) -> None:
    most = min(info.capabilities.max_logprobs, MAX_TOP_LOGPROBS)
    for field, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if value is not None and not 0 <= value <= most:
            raise InvalidRequestError(field, f"{field}={value}: use 0 to {most}")
    if sampling.prompt_logprobs is not None and not info.capabilities.prompt_logprobs:
        raise InvalidRequestError("prompt_logprobs", f"prompt_logprobs is not supported on {info.device}: leave it out")
