"""The wire form of what engines tell about themselves: rows among those of tokens, with a stream number of their own.

An engine sends its load when it has changed, and which blocks its cache has gained and lost, with the tokens of the
step in which that happened; and all that it has cached, when a line opens. Hashes are short ones, joined to one string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from cluster.frames import FrameError, Row
from cluster.routing.chain import SHORT_HASH_BYTES
from engine.news import EngineLoad

NEWS = 0
"""The stream number of news, which no request has."""

_LOAD, _CHANGES, _ALL = range(3)


class NewsReader(Protocol):
    """Who hears of engines. Hashes are short ones (`cluster.routing.chain`)."""

    def load_is(self, replica: str, load: EngineLoad) -> None: ...

    def cache_is(self, replica: str, hashes: Sequence[bytes]) -> None:
        """All blocks that it has."""
        ...

    def cache_changed(self, replica: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None: ...

    def lost(self, replica: str) -> None:
        """No more is heard of it."""
        ...


def load_row(load: EngineLoad) -> Row:
    return (NEWS, _LOAD, load.running, load.waiting, load.queued_tokens, load.free_blocks)


def changes_row(added: Iterable[bytes], removed: Iterable[bytes]) -> Row:
    return (NEWS, _CHANGES, b"".join(added), b"".join(removed))


def cache_row(hashes: Iterable[bytes]) -> Row:
    return (NEWS, _ALL, b"".join(hashes))


def read_row(row: Row, replica: str, reader: NewsReader) -> None:
    """Tells the reader what a row of this replica says.

    Raises:
        FrameError, TypeError, ValueError: it says nothing that makes sense.
    """
    match row[1:]:
        case (kind, int(running), int(waiting), int(queued_tokens), int(free_blocks)) if kind == _LOAD:
            load = EngineLoad(running=running, waiting=waiting, queued_tokens=queued_tokens, free_blocks=free_blocks)
            reader.load_is(replica, load)
        case (kind, bytes(added), bytes(removed)) if kind == _CHANGES:
            reader.cache_changed(replica, _split(added), _split(removed))
        case (kind, bytes(hashes)) if kind == _ALL:
            reader.cache_is(replica, _split(hashes))
        case _:
            raise FrameError("news of an unknown kind")


def _split(joined: bytes) -> list[bytes]:
    return [joined[start : start + SHORT_HASH_BYTES] for start in range(0, len(joined), SHORT_HASH_BYTES)]
