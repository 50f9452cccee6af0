"""StopStrings: watches a stream of text for stop strings and holds back what could be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One stream's state. The stop string that is complete first wins (of several there, the longest).

    The result does not depend on how the text is split into pushes. Time is linear in the text for any stop strings.

    Args:
        stops: strings, none empty.
        include: whether the stop string itself belongs to the text.
    """

    __slots__ = ("_held", "_include", "_matchers", "hit")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.hit: str | None = None
        """The stop string that was found."""

    @property
    def stopped(self) -> bool:
        return self.hit is not None

    def push(self, text: str) -> str:
        """Takes new text; returns what can be sent. After a hit, nothing more."""
        if self.hit is not None or not text:
            return ""
        ends = [
            (end, -len(matcher.stop), matcher.stop) for matcher in self._matchers if (end := matcher.push(text)) >= 0
        ]
        text, before = self._held + text, len(self._held)
        if ends:
            end, _, self.hit = min(ends)
            self._held = ""
            return text[: before + end - (0 if self._include else len(self.hit))]
        keep = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text held back, at the stream's end."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How far a text's end matches a stop string's beginning (Knuth, Morris and Pratt)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters
        self._fallback = _borders(stop)

    def push(self, text: str) -> int:
        """Reads text up to a match; returns the index behind it, or -1."""
        stop, matched, position = self.stop, self.matched, 0
        while position < len(text):
            if not matched:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            while matched and stop[matched] != text[position]:
                matched = self._fallback[matched - 1]
            matched += stop[matched] == text[position]
            position += 1
            if matched == len(stop):
                self.matched = 0
                return position
        self.matched = matched
        return -1


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return borders
