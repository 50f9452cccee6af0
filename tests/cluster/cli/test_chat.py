from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import httpx
import pytest

from cluster.cli.chat import ChatError, Conversation
from cluster.cli.main import main
from tests.cluster.cli.fake_server import FakeServer


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def test_a_piped_question_is_answered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", f"--url={server.url}/v1", "--system=Be brief.", "--temperature=0", "--max-tokens=2"]) == 0
    assert capsys.readouterr().out == "w0 w1 \n"
    body = server.bodies[0]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.0, 2, "fake")
    assert "top_p" not in body


def test_history_grows_and_reset_keeps_the_system_prompt(server: FakeServer, client: httpx.Client) -> None:
    conversation = Conversation(client, model="fake", system="S", sampling={})
    for question in ("one", "two"):
        assert "".join(conversation.ask(question)) == "w0 w1 w2 "
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    conversation.forget()
    list(conversation.ask("three"))
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["S", "three"]


@pytest.mark.parametrize(
    ("failure", "message"), [("status", "HTTP 429: queue is full"), ("midway", "the answer broke off: engine died")]
)
def test_a_failed_question_leaves_no_trace(
    server: FakeServer, client: httpx.Client, failure: str, message: str
) -> None:
    conversation = Conversation(client, model="fake", system=None, sampling={})
    server.failure = failure
    with pytest.raises(ChatError, match=message):
        list(conversation.ask("lost"))
    server.failure = None
    list(conversation.ask("again"))
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["again"]


def test_commands_of_the_terminal(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "/system Be kind.", "two", "/reset", "/what", "", "three", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    monkeypatch.setattr(sys, "stdin", _Terminal())
    assert main(["chat", f"--url={server.url}"]) == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["Be kind.", "two"], ["Be kind.", "three"]]
    assert "/quit" in capsys.readouterr().out


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("argv", "code"), [(["--url=http://127.0.0.1:9"], 1), (["--url=http://host:port"], 2)])
def test_no_server_is_one_line(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *argv]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_pipe_is_refused(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main(["chat", f"--url={server.url}"]) == 2
    assert "nothing to ask" in capsys.readouterr().err
