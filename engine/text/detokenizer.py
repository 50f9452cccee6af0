"""IncrementalDetokenizer: a stream of token ids to a stream of text, complete characters only, O(1) a token.

For the two common ways of joining tokens it needs no tokenizer call: about a microsecond a push. Other tokenizers are
decoded over a short window of recent tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from engine.text.token_table import Joining, TokenTable
from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_WINDOW = 6  # tokens of context that decide about spaces
_MAX_PENDING = 16  # tokens without a complete character, after which they are not waited for


class _Joiner(Protocol):
    def push(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class IncrementalDetokenizer:
    """One stream's state.

    What all pushes and finish() return, put together, is the tokenizer's decode of all ids. One exception: if a run of
    SentencePiece byte tokens turns out not to be UTF-8 behind characters already returned, decode would replace those.

    Args:
        skip_special_tokens: leave special tokens out of the text.
        after_prompt: the stream continues a text, so its first token's space is kept (SentencePiece).
    """

    __slots__ = ("_joiner",)

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, after_prompt: bool = False) -> None:
        table = tokenizer.table
        skipped = table.special_ids if skip_special_tokens else frozenset()
        self._joiner: _Joiner
        if table.joining is Joining.BYTE_LEVEL:
            self._joiner = _ByteLevel(table, skipped)
        elif table.joining is Joining.BYTE_FALLBACK:
            self._joiner = _ByteFallback(table, skipped, after_prompt)
        else:
            self._joiner = _Windowed(tokenizer, skipped)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is complete with these ids."""
        return self._joiner.push(token_ids)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character whose bytes didn't all come."""
        return self._joiner.finish()


class _ByteLevel:
    """All bytes are one UTF-8 stream."""

    __slots__ = ("_decoder", "_skipped", "_tokens")

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._tokens = table.tokens
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        tokens, skipped = self._tokens, self._skipped
        return self._decoder.decode(b"".join([tokens.get(i, b"") for i in token_ids if i not in skipped]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Texts of tokens, except that a run of byte tokens is UTF-8; of a run that is not, every byte is a U+FFFD."""

    __slots__ = ("_broken", "_pending", "_skipped", "_strips", "_table")

    def __init__(self, table: TokenTable, skipped: frozenset[int], after_prompt: bool) -> None:
        self._table = table
        self._skipped = skipped
        self._strips = table.strips_first_space and not after_prompt
        self._pending = b""  # bytes of an incomplete character
        self._broken = False  # the present run is not UTF-8

    def push(self, token_ids: Iterable[int]) -> str:
        table = self._table
        parts = []
        for token_id in token_ids:
            if token_id in self._skipped or token_id not in table.tokens:
                continue
            piece = table.tokens[token_id]
            parts.append(self._byte(piece) if token_id in table.byte_ids else self._end_of_run() + piece.decode())
        return self._without_first_space("".join(parts))

    def finish(self) -> str:
        return self._without_first_space(self._end_of_run())

    def _byte(self, byte: bytes) -> str:
        if self._broken:
            return _REPLACEMENT
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(self._pending) < _MAX_CHARACTER_BYTES:
                return ""
            self._broken = True
            text = _REPLACEMENT * len(self._pending)
        self._pending = b""
        return text

    def _end_of_run(self) -> str:
        text = _REPLACEMENT * len(self._pending)
        self._pending, self._broken = b"", False
        return text

    def _without_first_space(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _Windowed:
    """Decodes the last few tokens with and without the new ones; the difference is the new text.

    The method of vLLM and TGI: the window's start makes the tokenizer treat spaces as inside a text.
    """

    __slots__ = ("_ids", "_sent", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._sent = 0  # ids whose text has left

    def push(self, token_ids: Iterable[int]) -> str:
        parts = []
        for token_id in token_ids:
            if token_id not in self._skipped:
                self._ids.append(token_id)
                parts.append(self._advance(len(self._ids) - self._sent > _MAX_PENDING))
        return "".join(parts)

    def finish(self) -> str:
        return self._advance(last=True)

    def _advance(self, last: bool) -> str:
        sent = self._decode(self._ids[: self._sent])
        text = self._decode(self._ids)
        if not last and (len(text) <= len(sent) or text.endswith(_REPLACEMENT)):
            return ""
        del self._ids[: max(self._sent - _WINDOW, 0)]
        self._sent = len(self._ids)
        return text[len(sent) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
