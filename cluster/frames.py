"""The wire form of what engine steps yield: one msgpack array of rows per step and ingress.

A row is `(stream, token ids, cached tokens)`, followed by the rarer fields only when one is set: a step of 64 decoding
requests is 64 short rows, about 500 bytes. One of a request that is refused has a string in the second place. msgpack
delimits itself, so a connection is just one object after another. A frame too large to be buffered whole (prompt
logprobs take about 1 KiB per token) travels in pieces: byte strings, the last of them empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import msgpack

from cluster.messages import Refusal, RefusalKind
from engine.request import FinishReason, RequestOutput, TokenLogprobs

PIECE_BYTES = 4 << 20
MAX_BUFFER_BYTES = 4 * PIECE_BYTES
SIGN_OF_LIFE_S = 2.0
"""An engine that has nothing to send sends an empty frame this often."""
MISSED_SIGNS = 4
"""An engine of which so many signs are missing in a row hangs as a whole, or the way to it is broken."""

Row = tuple[Any, ...]
_SHORT = 3  # fields of a row that has none of the rarer ones


def to_row(stream: int, output: RequestOutput) -> Row:
    """The row of one output; `stream` is the number that the ingress gave the request."""
    if _is_plain(output):
        return (stream, output.token_ids, output.num_cached_tokens)
    return (
        stream,
        output.token_ids,
        output.num_cached_tokens,
        None if output.finish_reason is None else output.finish_reason.value,
        output.stop_token_id,
        output.error,
        _pack_logprobs(output.logprobs),
        _pack_logprobs(output.prompt_logprobs),
    )


def from_row(request_id: str, row: Row) -> RequestOutput:
    """The output that `to_row` was given."""
    if len(row) == _SHORT:
        return RequestOutput(request_id=request_id, token_ids=row[1], num_cached_tokens=row[2])
    _, token_ids, cached, reason, stop_token_id, error, logprobs, prompt_logprobs = row
    return RequestOutput(
        request_id=request_id,
        token_ids=token_ids,
        num_cached_tokens=cached,
        finish_reason=None if reason is None else FinishReason(reason),
        stop_token_id=stop_token_id,
        error=error,
        logprobs=_unpack_logprobs(logprobs),
        prompt_logprobs=_unpack_logprobs(prompt_logprobs),
    )


def from_rows(request_id: str, rows: Sequence[Row]) -> RequestOutput:
    """One output in place of those of consecutive rows of the same request."""
    if len(rows) == 1:
        return from_row(request_id, rows[0])
    if all(len(row) == _SHORT for row in rows):
        tokens = tuple(chain.from_iterable(row[1] for row in rows))
        return RequestOutput(request_id=request_id, token_ids=tokens, num_cached_tokens=rows[-1][2])
    return merge([from_row(request_id, row) for row in rows])


def refusal_row(stream: int, refusal: Refusal) -> Row:
    """The row that an engine sends in place of outputs, for a request that it does not take."""
    return (stream, refusal.kind.value, refusal.message, refusal.field, refusal.retry_after_s)


def is_refusal(row: Row) -> bool:
    return isinstance(row[1], str)


def to_refusal(row: Row) -> Refusal:
    """The refusal that `refusal_row` was given."""
    _, kind, message, field, retry_after_s = row
    return Refusal(kind=RefusalKind(kind), message=message, field=field, retry_after_s=retry_after_s)


def encode(rows: Iterable[Row]) -> bytes:
    """One frame, in pieces if it is large."""
    frame = bytes(msgpack.packb(list(rows), use_bin_type=True))
    if len(frame) <= PIECE_BYTES:
        return frame
    pieces = [frame[start : start + PIECE_BYTES] for start in range(0, len(frame), PIECE_BYTES)]
    return b"".join(msgpack.packb(piece, use_bin_type=True) for piece in (*pieces, b""))


class FrameError(ValueError):
    """What arrives are no frames."""


class Decoder:
    """Makes frames of bytes as they arrive."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(
            use_list=False, raw=False, strict_map_key=False, max_buffer_size=MAX_BUFFER_BYTES
        )
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[tuple[Row, ...]]:
        """The frames that are complete now.

        Raises:
            FrameError: it is something else; the connection is of no use any more.
        """
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                if not isinstance(message, bytes):
                    yield message
                elif message:
                    self._pieces.append(message)
                else:
                    frame, self._pieces = b"".join(self._pieces), []
                    yield msgpack.unpackb(frame, use_list=False, raw=False, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as error:  # BufferFull is no ValueError
            raise FrameError(str(error)) from error


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output in place of consecutive ones of the same request."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    if all(map(_is_plain, outputs)):
        tokens = tuple(chain.from_iterable([output.token_ids for output in outputs]))
        return RequestOutput(request_id=last.request_id, token_ids=tokens, num_cached_tokens=last.num_cached_tokens)
    logprobs = [entry for output in outputs if output.logprobs for entry in output.logprobs]
    prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return replace(
        last,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs) or last.logprobs,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )


def _is_plain(output: RequestOutput) -> bool:
    """Whether a row of it needs none of the rarer fields."""
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.stop_token_id is None
        and output.error is None
    )


def _pack_logprobs(entries: tuple[TokenLogprobs | None, ...] | None) -> list[Any] | None:
    if entries is None:
        return None
    return [None if entry is None else (entry.token_id, entry.logprob, entry.top) for entry in entries]


def _unpack_logprobs(entries: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if entries is None:
        return None
    return tuple(
        None if entry is None else TokenLogprobs(token_id=entry[0], logprob=entry[1], top=entry[2]) for entry in entries
    )
