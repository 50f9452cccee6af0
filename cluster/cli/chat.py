"""`sliceserve chat`: a conversation with a running server in the terminal, or one question from a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from cluster.cli.flags import FlagError, FlagParser
from cluster.cli.server_flags import add_server_flags, server_url

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt and forgets, /quit (or Ctrl-D) ends."
DEFAULTS = {"temperature": 0.7, "max_tokens": 1024}
"""A conversation should make sense, and end: small models ramble at the API's default temperature of 1."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty")


class ChatError(RuntimeError):
    """The server did not answer as it should. The message is one line."""


class Conversation:
    """The messages so far and the server they go to."""

    def __init__(self, client: httpx.Client, *, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forgets everything but the system prompt."""
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def forget(self) -> None:
        """Starts anew with the same system prompt."""
        self.reset(self._system)

    def ask(self, question: str) -> Iterator[str]:
        """Sends a question and yields the answer's pieces. A failed or interrupted question leaves no trace.

        Raises:
            ChatError: no answer, or a broken one.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        answer = ""
        for piece in self._stream(body):
            answer += piece
            yield piece
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_error_message(response.status_code, response.read()))
                for line in response.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        yield _piece(line[5:])
        except httpx.HTTPError as error:
            raise ChatError(f"no answer from {self._client.base_url}: {error}") from None


def chat(argv: Sequence[str]) -> int:
    """Runs the conversation. Returns 0, 1 without a server or an answer, 2 for wrong flags."""
    try:
        flags = _parser().parse(argv)
        sampling = {name: getattr(flags, name) for name in SAMPLING if getattr(flags, name) is not None}
    except FlagError as error:
        return _complain(str(error), 2)
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    timeout = httpx.Timeout(flags.timeout, connect=5)
    base_url = server_url(flags)
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=timeout) as client:
            model = flags.model or _served_model(client)
            conversation = Conversation(client, model=model, system=flags.system, sampling=sampling)
            if not sys.stdin.isatty():
                return _answer(conversation, sys.stdin.read().strip())
            print(f"{model} at {base_url}. {HELP}")
            _converse(conversation)
    except ChatError as error:
        return _complain(str(error), 1)
    except httpx.InvalidURL as error:
        return _complain(f"--url={base_url}: {error}", 2)
    return 0


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            conversation.forget()
            print("forgotten")
        elif command == "/system":
            conversation.reset(rest.strip() or None)
            print("system prompt set" if rest.strip() else "system prompt removed")
        elif command.startswith("/"):
            print(HELP)
        elif line:
            with contextlib.suppress(KeyboardInterrupt):
                _answer(conversation, line)


def _answer(conversation: Conversation, question: str) -> int:
    """Prints the answer as it comes; an error is one line on stderr."""
    if not question:
        return _complain("nothing to ask: the input is empty", 2)
    try:
        for piece in conversation.ask(question):
            print(piece, end="", flush=True)
    except ChatError as error:
        print(flush=True)
        return _complain(str(error), 1)
    print()
    return 0


def _served_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise ChatError(_error_message(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ChatError(f"no server at {client.base_url} ({error}); start one with: sliceserve serve") from None
    except (ValueError, LookupError, TypeError):
        raise ChatError(f"{client.base_url} lists no model; is it an OpenAI-compatible server?") from None


def _piece(payload: str) -> str:
    try:
        record = json.loads(payload)
    except ValueError:
        raise ChatError(f"the server sent something that is not JSON: {payload[:200]}") from None
    if "error" in record:
        raise ChatError(f"the answer broke off: {_message_of(record)}")
    choices = record.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def _error_message(status: int, body: bytes) -> str:
    try:
        message = _message_of(json.loads(body))
    except ValueError:
        message = body[:200].decode(errors="replace").strip()
    return f"HTTP {status}: {message}"


def _message_of(record: Any) -> str:
    error = record.get("error", record) if isinstance(record, dict) else record
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _complain(message: str, code: int) -> int:
    print(f"sliceserve chat: {message}", file=sys.stderr)
    return code


def _parser() -> FlagParser:
    parser = FlagParser(
        "sliceserve chat", "Talk to a running server. Reads one question from a pipe, or many from a terminal."
    )
    add_server_flags(parser)
    parser.add_argument("--model", help="model name (default: the first the server lists)")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--api_key", help="sent as bearer token")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds without a byte before giving up (default: 120)"
    )
    sampling = parser.add_argument_group("Sampling (where nothing is said: the server's defaults)")
    for name in SAMPLING:
        kind = int if name in ("top_k", "max_tokens", "seed") else float
        default = DEFAULTS.get(name)
        said = None if default is None else "(default: %(default)s)"
        sampling.add_argument(f"--{name}", type=kind, metavar=kind.__name__, default=default, help=said)
    return parser
