"""The bytes of every token, and how a tokenizer's decoder joins them.

With these tables, decoding a stream is a dictionary look-up per token. Two ways of joining cover nearly all language
models: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}


class Joining(Enum):
    BYTE_LEVEL = auto()  # text = the tokens' bytes, one after the other, as UTF-8
    BYTE_FALLBACK = auto()  # text of the tokens, except runs of <0x..> tokens, which are UTF-8
    OTHER = auto()  # only the tokenizer itself knows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    joining: Joining
    tokens: Mapping[int, bytes]  # a token's part of the text; incomplete UTF-8 where a character takes several tokens
    byte_ids: frozenset[int] = frozenset()  # <0x..> tokens
    special_ids: frozenset[int] = frozenset()  # left out with skip_special_tokens
    strips_first_space: bool = False  # a text's first space is the tokenizer's own


def build_token_table(backend: Any) -> TokenTable:
    """Builds the table of a `tokenizers.Tokenizer`."""
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    vocab: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        tokens = _byte_level(vocab)
        return TokenTable(joining=Joining.BYTE_LEVEL, tokens=tokens, special_ids=special)
    if _is_sentencepiece(steps, kinds):
        return _byte_fallback(vocab, special, strips=any(step.get("start") for step in steps))
    texts = {token_id: backend.decode([token_id], skip_special_tokens=False).encode() for token_id in vocab.values()}
    return TokenTable(joining=Joining.OTHER, tokens=texts, special_ids=special)


def _byte_level(vocab: Mapping[str, int]) -> dict[int, bytes]:
    byte_of = {character: byte for byte, character in enumerate(byte_level_alphabet())}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # an added token, which stands for itself
            return token.encode()

    return {token_id: to_bytes(token) for token, token_id in vocab.items()}


def byte_level_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable: Iterable[int] = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return [alphabet[byte] for byte in range(256)]


def _is_sentencepiece(steps: list[dict[str, Any]], kinds: list[str]) -> bool:
    """Whether the decoder is: space marks to spaces, byte tokens joined, at most one leading space taken off."""
    if not {"Replace", "ByteFallback", "Fuse"} <= set(kinds) <= _SENTENCEPIECE_STEPS or len(kinds) != len(set(kinds)):
        return False
    options = dict(zip(kinds, steps, strict=True))
    replace, strip = options["Replace"], options.get("Strip", {"content": " ", "start": 0, "stop": 0})
    replaces_marks = replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " "
    fused_before = "Strip" not in kinds or kinds.index("Strip") > kinds.index("Fuse")
    return replaces_marks and fused_before and strip["content"] == " " and strip["start"] <= 1 and not strip["stop"]


def _byte_fallback(vocab: Mapping[str, int], special: frozenset[int], *, strips: bool) -> TokenTable:
    tokens: dict[int, bytes] = {}
    byte_ids = set()
    for token, token_id in vocab.items():
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            tokens[token_id] = bytes([int(match[1], 16)])
            byte_ids.add(token_id)
        else:
            tokens[token_id] = token.replace(_SPACE_MARK, " ").encode()
    return TokenTable(
        joining=Joining.BYTE_FALLBACK,
        tokens=tokens,
        byte_ids=frozenset(byte_ids),
        special_ids=special,
        strips_first_space=strips,
    )
