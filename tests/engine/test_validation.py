from __future__ import annotations

from typing import Any

import pytest

from backends.mock import MockBackend
from engine.backend import BackendInfo, Capabilities
from engine.config import EngineConfig
from engine.request import EngineRequest, SamplingParams
from engine.validation import InvalidRequestError, validate

POOR = Capabilities(penalties=False, min_p=False, logit_bias=0, bad_words=0, max_logprobs=5, prompt_logprobs=False)


def backend_info(capabilities: Capabilities | None = None) -> BackendInfo:
    config = EngineConfig.from_args({"backend": "mock", "max_model_len": 100})
    return MockBackend(config, capabilities=capabilities).load()


def check(info: BackendInfo, *, prompt: tuple[int, ...] = (1, 2), longest: int | None = None, **sampling: Any) -> None:
    own = {"output_token_ids": sampling.pop("output_token_ids", ())}
    params = SamplingParams(**{"max_tokens": 5, **sampling})
    request = EngineRequest(request_id="a", prompt_token_ids=prompt, sampling=params, **own)
    validate(request, info, longest_prompt=longest)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt": ()}, "prompt", "no tokens"),
        ({"prompt": (1,) * 100}, "prompt", "has 100 tokens, but at most 99 fit a context of 100: shorten it"),
        ({"prompt": (1,) * 40, "longest": 32}, "prompt", "enable_chunked_prefill"),
        ({"prompt": (1, 49152)}, "prompt", "token id 49152 is not in the vocabulary of 49152"),
        ({"prompt": (1, -1)}, "prompt", "token id -1"),
        ({"output_token_ids": (99999,)}, "prompt", "token id 99999"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias", "token id 49152"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias", "301 entries, at most 300"),
        ({"bad_words": ((-5,),)}, "bad_words", "token id -5"),
        ({"bad_words": ((1,),) * 33}, "bad_words", "33 sequences, at most 32"),
        ({"bad_words": ((1,) * 9,)}, "bad_words", "9 tokens per sequence, at most 8"),
        ({"stop_token_ids": (50000,)}, "stop_token_ids", "token id 50000"),
        ({"stop_token_ids": tuple(range(40)), "min_tokens": 1}, "stop_token_ids", "at most 32"),
        ({"logprobs": 21}, "logprobs", "logprobs=21: use 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "use 0 to 20"),
        ({"seed": 2**64}, "seed", "64-bit"),
        ({"top_k": 2**31}, "top_k", "top_k=2147483648"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
    ],
)
def test_what_would_break_a_step_is_refused(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check(backend_info(), **fields)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("min_p", 0.1),
        ("logit_bias", {1: 1.0}),
        ("bad_words", ((1,),)),
        ("logprobs", 6),
        ("prompt_logprobs", 0),
    ],
)
def test_what_the_backend_cannot_do_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(backend_info(POOR), **{field: value})
    assert caught.value.field == field
    check(backend_info(), **{field: value})


def test_what_just_fits_is_taken() -> None:
    check(backend_info(), prompt=(0, 49151) * 49 + (1,))
    check(backend_info(), prompt=(1,) * 100, max_tokens=0)
    check(backend_info(POOR), logprobs=5)
