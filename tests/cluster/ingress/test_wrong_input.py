"""Wrong requests, systematically: every one is refused with its status and the parameter's name, and nothing breaks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.mock import MockBackend
from cluster.ingress.errors import ApiError
from cluster.ingress.prompts import read_completion
from cluster.ingress.protocol.chat import ChatRequest
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.protocol.unavailable import CHAT as CHAT_NEUTRAL
from cluster.ingress.sampling import Limits
from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
VALID = {CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, COMPLETION: {"prompt": "Hi"}}

BOTH: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**30),
    ("min_p", 1.5),
    ("min_p", -1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("frequency_penalty", []),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("max_tokens", -1),
    ("max_tokens", 2048),
    ("max_tokens", 10**100),
    ("max_tokens", "many"),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["a"] * 17),
    ("stop", ["a", 5]),
    ("stop_token_ids", [49152]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"49152": 1}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("logit_bias", [1]),
    ("bad_words", [f"word{i}" for i in range(17)]),
    ("bad_words", ["a" * 129]),
    ("bad_words", [" "]),
    ("bad_words", ["Supercalifragilisticexpialidocious antidisestablishmentarianism"]),
    ("bad_words", [""]),
    ("ignore_eos", "yes"),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("cache_salt", ""),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("response_format", {"type": "json_object"}),
    ("service_tier", "flex"),
    ("store", True),
    ("guided_json", {}),
    ("user", 5),
    ("metadata", "x"),
    ("metadata", {"a": 1}),
    ("no_such_parameter", 1),
    ("skip_special_tokens", "no"),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "Hi"),
    ("messages", None),
    ("logprobs", 5),
    ("top_logprobs", 2),
    ("max_completion_tokens", 0),
    ("max_tokens", 0),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("reasoning_effort", "high"),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content"}),
    ("web_search_options", {}),
    ("chat_template", "{{ x }}"),
    ("continue_final_message", True),
    ("chat_template_kwargs", "x"),
    *[
        ("chat_template_kwargs", {name: value})
        for name, value in {
            "add_generation_prompt": True,
            "chat_template": "{{ x }}",
            "continue_final_message": False,
            "tokenize": True,
            "tools": [],
        }.items()
    ],
    ("best_of", 2),
    ("echo", True),
]
COMPLETION_ONLY: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", [[]]),
    ("prompt", ["a", 5]),
    ("prompt", [True]),
    ("prompt", [49152]),
    ("prompt", [-1]),
    ("prompt", ["a"] * 1025),
    ("logprobs", 21),
    ("logprobs", True),
    ("best_of", 2),
    ("suffix", "end"),
    ("max_tokens", 0),
    ("max_completion_tokens", 5),
    ("messages", []),
]
MESSAGES: list[tuple[Any, str]] = [
    ({"role": "user"}, "messages[0]"),
    ({"content": "Hi"}, "messages[0].role"),
    ({"role": "robot", "content": "Hi"}, "messages[0].role"),
    ({"role": "tool", "content": "Hi", "tool_call_id": "1"}, "messages[0].tool_call_id"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0]"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": "Hi", "mood": "good"}, "messages[0].mood"),
    ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ("Hi", "messages[0]"),
    (5, "messages[0]"),
]


MEGABYTE = 1 << 20


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    """Status and param of an error in OpenAI's shape with a one-line message."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 500
    return response.status_code, error["param"]


def cases() -> list[Any]:
    found = [(route, name, value) for route in (CHAT, COMPLETION) for name, value in BOTH]
    found += [(CHAT, name, value) for name, value in CHAT_ONLY]
    found += [(COMPLETION, name, value) for name, value in COMPLETION_ONLY]
    return [pytest.param(*case, id=f"{case[0][4:8]}-{case[1]}-{str(case[2])[:24]}") for case in found]


@pytest.mark.parametrize(("route", "name", "value"), cases())
def test_a_wrong_value_is_a_400_naming_the_parameter(http: httpx.Client, route: str, name: str, value: object) -> None:
    status, param = refusal(http.post(route, json={**VALID[route], name: value}))
    assert status == 400
    assert param is not None
    assert param == name or param.startswith((f"{name}[", f"{name}."))


@pytest.mark.parametrize(("message", "param"), MESSAGES)
def test_a_wrong_message_is_a_400_saying_where(http: httpx.Client, message: object, param: str) -> None:
    assert refusal(http.post(CHAT, json={"messages": [message]})) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"{'messages': []}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"a":' * 5000,
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETION, "/generate"])
def test_what_is_not_a_json_object_is_a_400(http: httpx.Client, route: str, body: bytes) -> None:
    assert refusal(http.post(route, content=body, headers={"content-type": "application/json"})) == (400, None)


def test_numbers_that_overflow_are_a_400(http: httpx.Client) -> None:
    body = b'{"prompt": "Hi", "temperature": 1e999}'
    assert refusal(http.post(COMPLETION, content=body)) == (400, "temperature")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "a\\ud800b"}', "prompt"),
        ('{"prompt": "Hi", "stop": ["\\udc00"]}', "stop[0]"),
        ('{"prompt": "Hi", "bad_words": ["\\ud800"]}', "bad_words[0]"),
        ('{"prompt": "Hi", "metadata": {"\\ud800": "x"}}', "metadata"),
    ],
)
def test_half_a_surrogate_pair_is_a_400(http: httpx.Client, body: str, param: str) -> None:
    assert refusal(http.post(COMPLETION, content=body.encode())) == (400, param)
    assert refusal(http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "\\ud800"}]}')) == (
        400,
        "messages[0].content",
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"instances": [{"prompt": "\xed\xa0\x80"}]}',
        '{"prompt": "Hi"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETION, "/generate"])
def test_a_body_that_is_not_utf_8_is_a_400(http: httpx.Client, route: str, body: bytes) -> None:
    response = http.post(route, content=body)
    assert refusal(response) == (400, None)
    assert "the body is not UTF-8" in response.json()["error"]["message"]


def test_text_that_the_tokenizer_refuses_is_a_400(tokenizer: Tokenizer) -> None:
    limits = Limits(info=MockBackend(EngineConfig()).load(), tokenizer=tokenizer)
    with pytest.raises(ApiError, match=r"prompt: .*surrogate") as raised:
        read_completion(CompletionRequest(prompt="\ud800"), limits)
    assert raised.value.status == 400


def test_a_prompt_that_is_too_long_says_both_lengths(http: httpx.Client) -> None:
    response = http.post(COMPLETION, json={"prompt": [1000] * 3000})
    assert refusal(response) == (400, "prompt")
    assert "3000" in response.json()["error"]["message"]
    assert "2048" in response.json()["error"]["message"]
    long_chat = [{"role": "user", "content": "word " * 5000}]
    assert refusal(http.post(CHAT, json={"messages": long_chat})) == (400, "messages")


def test_what_a_client_wrote_in_several_lines_is_quoted_in_one(http: httpx.Client) -> None:
    for body in ({**VALID[CHAT], "a\nb\r": 1}, {**VALID[CHAT], "model": "a\nb"}):
        message = http.post(CHAT, json=body).json()["error"]["message"]
        assert len(message.splitlines()) == 1


def test_a_wrong_model_is_a_404_and_an_empty_one_is_the_served(http: httpx.Client) -> None:
    assert refusal(http.post(CHAT, json={**VALID[CHAT], "model": "gpt-5"})) == (404, "model")
    assert http.post(CHAT, json={**VALID[CHAT], "model": ""}).status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert refusal(http.get("/v2/nothing")) == (404, None)
    assert refusal(http.post("/v1/embeddings", json={})) == (404, None)
    assert refusal(http.get(CHAT)) == (405, None)
    assert refusal(http.post("/health")) == (405, None)
    assert refusal(http.get("/static/../app.py")) == (404, None)


def test_a_body_that_is_too_large_is_a_413(http: httpx.Client) -> None:
    assert refusal(http.post(CHAT, content=b" " * (17 << 20))) == (413, None)

    def chunks() -> Any:
        for _ in range(17):
            yield b" " * (1 << 20)

    assert refusal(http.post(CHAT, content=chunks())) == (413, None)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "Hi", "x" * MEGABYTE: 1}, 400),
        ({"prompt": "Hi", "model": "x" * MEGABYTE}, 404),
        ({"prompt": "Hi", "logit_bias": {"x" * MEGABYTE: "much"}}, 400),
        ({"prompt": "Hi", "stream_options": {"x" * MEGABYTE: 1}, "stream": True}, 400),
    ],
)
def test_what_a_client_sent_is_quoted_in_short(http: httpx.Client, body: dict[str, object], status: int) -> None:
    response = http.post(COMPLETION, json=body)
    assert response.status_code == status
    assert len(response.content) < 2000
    assert "xxx…xxx" in response.json()["error"]["message"]
    assert not response.json()["error"]["message"].endswith("x")  # what is wrong with it is still said


def test_an_error_before_the_first_token_is_no_stream(http: httpx.Client) -> None:
    response = http.post(CHAT, json={**VALID[CHAT], "stream": True, "top_k": -7})
    assert refusal(response) == (400, "top_k")
    assert response.headers["content-type"] == "application/json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("text"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHAT_NEUTRAL, "instances"})
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(route=st.sampled_from([CHAT, COMPLETION, "/generate"]), body=st.dictionaries(NAMES, JSON, max_size=4))
def test_no_body_whatever_makes_the_server_fail(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    whole = {**VALID.get(route, {}), **body}
    response = http.post(route, content=json.dumps(whole), headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert refusal(response)[0] in (400, 404)


def test_the_server_goes_on_after_all_of_it(http: httpx.Client) -> None:
    for route, body in VALID.items():
        assert http.post(route, content=json.dumps(body)).status_code == 200
    assert http.get("/health").status_code == 200
