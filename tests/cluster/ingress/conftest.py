"""One server for most tests of the protocol, and the official client for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from backends.mock import mock_tokens
from engine.text.tokenizer import Tokenizer
from tests.cluster.ingress.local_client import LocalServer, demo_tokenizer, local_server

Solo = Callable[..., str]


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    with local_server(max_model_len=2048) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="session")
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture(scope="session")
def solo(tokenizer: Tokenizer) -> Solo:
    """The text that the mock model answers a prompt with, computed without any server."""

    def text(prompt: str | list[int], count: int, *, seed: int = 0) -> str:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return tokenizer.decode(mock_tokens(ids, count, seed=seed))

    return text
