"""Vertex AI's prediction protocol on /generate, and the probes on /ping and /health."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.ingress.conftest import Solo

CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def generate(http: httpx.Client, body: object) -> httpx.Response:
    return http.post("/generate", json=body)


def test_instances_become_predictions_in_order(http: httpx.Client, solo: Solo) -> None:
    instances = [
        {"prompt": f" Tale {i}\n", "max_tokens": 5, "temperature": 0, "top_p": 1, "top_k": 1} for i in range(4)
    ]
    predictions = generate(http, {"instances": instances}).json()["predictions"]
    assert predictions == [f"Prompt:\nTale {i}\nOutput:\n" + solo(f" Tale {i}\n", 5).strip("\n") for i in range(4)]


def test_raw_response_is_the_output_alone(http: httpx.Client, solo: Solo) -> None:
    instance = {"prompt": "Tale", "max_tokens": 5, "temperature": 0, "raw_response": True}
    assert generate(http, {"instances": [instance]}).json() == {"predictions": [solo("Tale", 5)]}


def test_parameters_are_defaults_of_the_instances(http: httpx.Client, solo: Solo) -> None:
    body = {
        "instances": [{"prompt": "Tale"}, {"prompt": "Tale", "max_tokens": 2}],
        "parameters": {"max_tokens": 6, "temperature": 0, "raw_response": True},
    }
    assert generate(http, body).json()["predictions"] == [solo("Tale", 6), solo("Tale", 2)]


def test_whole_numbers_may_come_as_floats(http: httpx.Client, solo: Solo) -> None:
    instance = {"prompt": "Tale", "max_tokens": 5.0, "top_k": 1.0, "temperature": 0.0, "raw_response": True}
    assert generate(http, {"instances": [instance]}).json()["predictions"] == [solo("Tale", 5)]


def test_a_chat_instance_is_answered_as_chat(http: httpx.Client) -> None:
    predictions = generate(http, {"instances": [CHAT, {"prompt": "Tale"}]}).json()["predictions"]
    assert predictions[0]["object"] == "chat.completion"
    assert predictions[0]["choices"][0]["message"]["content"]
    assert predictions[0]["usage"]["completion_tokens"] == 4
    assert predictions[1].startswith("Prompt:\nTale\nOutput:\n")


def test_a_chat_body_is_answered_like_the_chat_route(http: httpx.Client) -> None:
    assert generate(http, CHAT).json()["object"] == "chat.completion"
    streamed = generate(http, {**CHAT, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "instances"),
        ({"instances": []}, "instances"),
        ({"instances": {}}, "instances"),
        ({"instances": ["Tale"]}, "instances"),
        ({"instances": [{"prompt": "a"}] * 257}, "instances"),
        ({"instances": [{"prompt": "Tale"}], "parameters": []}, "parameters"),
        ({"instances": [{}], "parameters": {"prompt": "Tale"}}, "parameters.prompt"),
        ({"instances": [CHAT], "parameters": {"chat_template_kwargs": {}}}, "parameters.chat_template_kwargs"),
        ({"instances": [{"prompt": "Tale"}], "more": 1}, "more"),
        ({"instances": [{"prompt": "Tale"}, {"prompt": "Tale", "top_k": -5}]}, "instances[1].top_k"),
        ({"instances": [{"prompt": "Tale", "colour": "red"}]}, "instances[0].colour"),
        ({"instances": [{"max_tokens": 5}]}, "instances[0].prompt"),
        ({"instances": [{"prompt": ""}]}, "instances[0].prompt"),
        ({"instances": [{"prompt": "Tale", "stop_token_ids": [10**6]}]}, "instances[0].stop_token_ids"),
        ({"instances": [{**CHAT, "stream": True}]}, "instances[0].stream"),
        ({"instances": [{**CHAT, "@requestFormat": "poem"}]}, "instances[0].@requestFormat"),
        ({"instances": [{**CHAT, "messages": []}]}, "instances[0].messages"),
        ({"instances": [{**CHAT, "n": 128}] * 9}, "instances"),  # 1152 sequences
        ({"prompt": "Tale"}, "prompt"),
    ],
)
def test_wrong_bodies_are_a_400_saying_where(http: httpx.Client, body: object, param: str) -> None:
    response = generate(http, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("route", ["/ping", "/health"])
def test_probes_answer_when_healthy(http: httpx.Client, route: str) -> None:
    assert http.get(route).json() == {"status": "ok"}


@pytest.mark.parametrize("route", ["/", "/ping", "/health", "/static/app.js"])
def test_head_answers_like_get_without_a_body(http: httpx.Client, route: str) -> None:
    head, get = http.head(route), http.get(route)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length", "etag", "content-security-policy"):
        assert head.headers.get(name) == get.headers.get(name)


def test_metrics_are_prometheus_text(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"num_requests_running" in response.content
