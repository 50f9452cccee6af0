"""Reads one streamed answer: when its tokens came and how many there were."""

from __future__ import annotations

import json
import time
from typing import Any

EVENT_END = b"\n\n"
EMPTY_TEXT = (b'"content":""', b'"content": ""')


class StreamReader:
    """Fed with the body's bytes as they arrive; keeps times only, decodes JSON only where a number is needed.

    A server may put several tokens into one event, so gaps between arrivals are kept as they are and tokens are counted
    by the server's usage record.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._rest = b""
        self.arrivals: list[float] = []
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None
        self.finished = False

    def feed(self, data: bytes) -> None:
        """Takes bytes of the body."""
        now = time.perf_counter()
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(EVENT_END)
        for event in events:
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):
            return
        payload = event[5:].strip()
        if payload == b"[DONE]":
            self.finished = True
        elif b'"usage":{' in payload or b'"usage": {' in payload:
            self._take_usage(payload, now)
        elif payload.startswith((b'{"error"', b'{"object":"error"')):
            self.error = payload[:300].decode(errors="replace")
        elif self._carries_tokens(payload):
            self.arrivals.append(now)

    def _carries_tokens(self, payload: bytes) -> bool:
        """Chat answers open with an event that names the role and has no text: it isn't a token."""
        if not self._chat or self.arrivals:
            return True
        return not any(empty in payload for empty in EMPTY_TEXT)

    def _take_usage(self, payload: bytes, now: float) -> None:
        record = json.loads(payload)
        self.usage = record.get("usage") or self.usage
        choices = record.get("choices")
        if choices and _has_text(choices[0]):
            self.arrivals.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
