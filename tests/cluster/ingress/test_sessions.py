"""What names the session of a request, where sessions stick to replicas."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.ingress.local_client import LocalServer, local_server

HEADER = {"X-Session-ID": "header"}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def sticky() -> Iterator[LocalServer]:
    with local_server(sticky_sessions=True) as running:
        yield running


def session(server: LocalServer, route: str, body: dict[str, object], headers: dict[str, str]) -> str:
    response = httpx.post(server.url + route, json=body, headers=headers, timeout=30)
    assert response.status_code == 200, response.text
    return server.client.sessions[-1]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("labels", "headers", "expected"),
    [
        ({}, {}, ""),
        ({"user": "user"}, {}, "user"),
        ({"user": "user", "prompt_cache_key": "key"}, {}, "key"),
        ({"user": "user", "prompt_cache_key": "key"}, HEADER, "header"),
    ],
)
def test_the_header_comes_first_then_the_cache_key_then_the_user(
    sticky: LocalServer, route: str, labels: dict[str, object], headers: dict[str, str], expected: str
) -> None:
    prompt = {"messages": MESSAGES} if "chat" in route else {"prompt": "hi"}
    assert session(sticky, route, {**prompt, "max_tokens": 1, **labels}, headers) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [{"prompt": "hi", "max_tokens": 1}]},
        {"@requestFormat": "chatCompletions", "messages": MESSAGES, "max_tokens": 1},
    ],
)
def test_predictions_have_the_session_of_the_header(sticky: LocalServer, body: dict[str, object]) -> None:
    assert session(sticky, "/generate", body, HEADER) == "header"


def test_without_the_option_nothing_is_a_session(server: LocalServer) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "user": "user", "prompt_cache_key": "key"}
    assert session(server, "/v1/completions", body, HEADER) == ""
