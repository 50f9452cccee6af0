"""TokenStops: stop strings over one choice's tokens, counted from `min_tokens` on."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.stop import StopStrings


class TokenStops:
    """One choice's stop strings. As in vLLM, one may begin within the first `min_tokens` tokens but not end there.

    Args:
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool, min_tokens: int) -> None:
        self._stops = stops
        self._include = include
        self._matcher = StopStrings(stops, include=include)
        self._most = max(map(len, stops)) - 1
        self._early = min_tokens  # tokens to come that end no choice
        self._tail = ""  # held back meanwhile: a stop string may have begun in it

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    def push(self, text: str) -> str:
        """Takes the text of one token; returns what can be sent."""
        if not self._early:
            return self._matcher.push(text)
        self._early -= 1
        self._tail += text
        ready = max(len(self._tail) - self._most, 0)
        text, self._tail = self._tail[:ready], self._tail[ready:]
        return text if self._early else text + self._begin()

    def finish(self, text: str) -> str:
        """Takes what the detokenizer had left; returns everything held back up to a stop string."""
        if self._early:
            return self._tail + text
        text = self._matcher.push(text)
        return text if self.stopped else text + self._matcher.finish()

    def _begin(self) -> str:
        """Hands over to the matcher: it sees the end of the early text that may begin a stop string, and no match."""
        tail, self._tail = self._tail, ""
        for size in sorted({_overlap(tail, stop) for stop in self._stops}, reverse=True):
            matcher = StopStrings(self._stops, include=self._include)
            ready = matcher.push(tail[len(tail) - size :])
            if not matcher.stopped:
                self._matcher = matcher
                return tail[: len(tail) - size] + ready
        return tail


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
