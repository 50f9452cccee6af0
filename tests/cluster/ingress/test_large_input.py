"""Requests as large as a body may be: what can't be served is refused before anything slow is done with it."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from cluster.ingress.body import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_VALUES, parse_json
from cluster.ingress.errors import ApiError
from cluster.ingress.protocol.chat import parse_chat
from cluster.ingress.protocol.completion import parse_completion
from cluster.ingress.vertex_routes import parse_instances
from engine.text.tokenizer import Tokenizer
from tests.cluster.ingress.test_wrong_input import CHAT, COMPLETION, refusal

NOVEL = "a" * (15 << 20)
MILLION = 1_000_000
MANY = {f"k{i}": "x" for i in range(MILLION // 2)}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (COMPLETION, {"prompt": ["Hi", NOVEL]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": NOVEL}]}, "messages"),
        ("/generate", {"instances": [{"prompt": NOVEL}]}, "instances[0].prompt"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    http: httpx.Client, route: str, body: object, param: str
) -> None:
    started = time.monotonic()
    response = http.post(route, json=body)
    assert time.monotonic() - started < 5  # tokenizing it would take half a minute
    assert refusal(response) == (400, param)
    assert "characters, but at most" in response.json()["error"]["message"]


def test_no_text_of_fewer_tokens_than_the_context_is_refused_by_its_length(tokenizer: Tokenizer) -> None:
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.token_text(token)))
    assert len(tokenizer.decode([longest] * 50)) <= 50 * tokenizer.longest_token


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("stop_token_ids", [""] * MILLION, "stop_token_ids"),
        ("stop_token_ids", [5] * MILLION, "stop_token_ids"),
        ("bad_words", [5] * MILLION, "bad_words"),
        ("stop", [5] * MILLION, "stop"),
        ("logit_bias", MANY, "logit_bias"),
        ("metadata", dict.fromkeys(MANY, 5), "metadata"),
        ("stream_options", MANY, "stream_options.k0"),
        ("messages", [5] * MILLION, "messages"),
        ("messages", [{"role": "user", "content": [5] * 1000}] * 1000, "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": "Hi", **MANY}], "messages[0].k0"),
        ("prompt", [""] * MILLION, "prompt"),
        ("prompt", [[""]] * MILLION, "prompt"),
        ("prompt", [5] * MILLION + [""], "prompt"),
        ("parameters", MANY, "parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_million_wrong_items_are_refused_as_fast_as_one(name: str, value: object, param: str) -> None:
    parse = {"messages": parse_chat, "parameters": parse_instances}.get(name, parse_completion)
    body = {"prompt": "Hi", name: value} if parse is parse_completion else {"instances": [{}] * 256, name: value}
    started = time.process_time()
    with pytest.raises(ApiError) as raised:
        parse({name: value} if parse is parse_chat else body)
    assert time.process_time() - started < 1.5
    assert raised.value.param == param
    assert len(raised.value.message) < 200


def test_a_million_unknown_fields_are_refused_as_fast_as_one(http: httpx.Client) -> None:
    started = time.process_time()
    assert refusal(http.post(COMPLETION, json={"prompt": "Hi", **MANY})) == (400, "k0")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("item", ["1", "1.5", "[]", "{}", '""', '{"role": "user", "content": ""}'])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_millions_of_values_are_refused_before_they_are_parsed(http: httpx.Client, field: str, item: str) -> None:
    body = f'{{"{field}": [{",".join([item] * ((MAX_BODY_BYTES - 64) // (len(item) + 1)))}]}}'
    started = time.process_time()
    response = http.post(COMPLETION, content=body)
    assert time.process_time() - started < 1
    assert response.status_code == 413
    assert "is the most" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * (MAX_VALUES - 10)},
        {"prompt": "a, b" * (MAX_VALUES // 2)},
        {"prompt": "{" * (MAX_CONTAINERS - 10)},
    ],
)
def test_bodies_within_the_bound_are_read(body: dict[str, object]) -> None:
    assert parse_json(json.dumps(body).encode()) == body
