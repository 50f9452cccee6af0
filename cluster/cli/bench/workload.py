"""What is sent: prompts, and when they are sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FIRST_ORDINARY_ID = 1000
"""Random token ids start here: special tokens are the first or the last of a vocabulary."""

# Short English words, each of which is one token in most vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand",
    "part place case week company system program question work number night point home water room mother area money",
    "story fact month lot right study book eye job word business issue side kind head house service friend father",
    "power hour game line end member law car city name team minute idea body back parent face level office door",
    "health person art war history party result change morning reason research girl guy moment air teacher force",
)
VOCABULARY = tuple(word for line in WORDS for word in line.split())


class WorkloadError(ValueError):
    """The workload can't be built. The message is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One request to send: the endpoint's own part of the body, and how many tokens to ask for."""

    body: dict[str, Any]
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShape:
    """Random prompts of `prompt_tokens` tokens, the first `shared_prefix_tokens` of which are the same in all of them.

    `form` ids gives exact lengths; text gives that many common words, so that the server's count differs a little.
    """

    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    form: Literal["ids", "text"] = "ids"
    vocab_size: int = 32000

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise WorkloadError("prompt and output need at least one token each")
        if not 0 <= self.shared_prefix_tokens <= self.prompt_tokens:
            raise WorkloadError(
                f"a prefix of {self.shared_prefix_tokens} tokens does not fit into prompts of {self.prompt_tokens}"
            )
        if self.vocab_size <= FIRST_ORDINARY_ID:
            raise WorkloadError(f"vocab_size must be above {FIRST_ORDINARY_ID}")


def random_items(shape: PromptShape, *, chat: bool, seed: int) -> Iterator[WorkItem]:
    """Endless random prompts; the same seed gives the same ones."""
    rng = random.Random(seed)
    prefix = _tokens(rng, shape, shape.shared_prefix_tokens)
    while True:
        tokens = prefix + _tokens(rng, shape, shape.prompt_tokens - len(prefix))
        prompt = tokens if shape.form == "ids" else " ".join(str(token) for token in tokens)
        body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        yield WorkItem(body=body, max_tokens=shape.output_tokens)


def _tokens(rng: random.Random, shape: PromptShape, count: int) -> list[int | str]:
    if shape.form == "ids":
        return [rng.randrange(FIRST_ORDINARY_ID, shape.vocab_size) for _ in range(count)]
    return [rng.choice(VOCABULARY) for _ in range(count)]


def jsonl_items(path: Path, *, chat: bool, output_tokens: int) -> Iterator[WorkItem]:
    """Requests from a file, over and over: one JSON object a line, `prompt` or `messages`, and optional `max_tokens`.

    Raises:
        WorkloadError: the file can't be read or a line is not such an object.
    """
    items = [_item(path, number, line, chat, output_tokens) for number, line in _lines(path)]
    if not items:
        raise WorkloadError(f"{path} holds no requests")
    while True:
        yield from items


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"can't read {path}: {error}") from None
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _item(path: Path, number: int, line: str, chat: bool, output_tokens: int) -> WorkItem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(record, dict) or not ({"prompt", "messages"} & record.keys()):
        raise WorkloadError(f"{path}, line {number}: needs a key `prompt` or `messages`")
    if chat:
        messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        body: dict[str, Any] = {"messages": messages}
    elif "prompt" in record:
        body = {"prompt": record["prompt"]}
    else:
        raise WorkloadError(f"{path}, line {number}: `messages` need --endpoint=chat")
    return WorkItem(body=body, max_tokens=int(record.get("max_tokens", output_tokens)))


def poisson_offsets(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive, `rate` a second on average, endlessly."""
    rng = random.Random(seed)
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now
