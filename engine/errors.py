"""Errors in one line: what other people's exceptions say, without the rest."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
