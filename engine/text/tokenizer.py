"""Tokenizer: text to token ids and back, chat templates, and the texts of single tokens.

A small class over transformers' AutoTokenizer. The hot paths go to the Rust tokenizer directly (no GIL, half the time).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from engine.config import EngineConfig
from engine.errors import first_line
from engine.text.loading import load_hf_tokenizer
from engine.text.token_table import Joining, TokenTable, build_token_table

_RESERVED_KWARGS = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class TextError(ValueError):
    """A request's text or conversation can't be used. The message is one line for the client."""


class Tokenizer:
    """Safe to share between threads.

    Args:
        hf: a tokenizer of transformers.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._fast = hf.backend_tokenizer if hf.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this (the model's vocabulary may be larger, for padding)."""
        return len(self._hf)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._hf.eos_token_id
        return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @cached_property
    def table(self) -> TokenTable:
        """The bytes of every token."""
        if self._fast is not None:
            return build_token_table(self._fast)
        texts = {i: self._hf.decode([i], skip_special_tokens=False).encode() for i in range(self.vocab_size)}
        return TokenTable(joining=Joining.OTHER, tokens=texts, special_ids=frozenset(self._hf.all_special_ids))

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n tokens has at most n times as many characters."""
        return max(map(len, self.table.tokens.values()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The tokenizer's own beginning-of-sequence token is not put before one in the text.

        Raises:
            TextError: the text holds half of a surrogate pair (not Unicode).
        """
        try:
            ids = self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise TextError("the text holds a lone surrogate, which is not valid Unicode") from None
        bos = self._hf.bos_token
        if add_special_tokens and bos and ids[:2] == [self._hf.bos_token_id] * 2 and text.startswith(bos):
            return ids[1:]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if self._fast is not None:
            ids = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; U+FFFD where its bytes are not UTF-8."""
        text: str = self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """One token's part of the text as UTF-8; of a character of several tokens, its share of the bytes."""
        return self.table.tokens.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """One token's part of the text, U+FFFD for parts of characters. Special tokens are written out."""
        return self.token_bytes(token_id).decode(errors="replace")

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write each word, at a text's start and after a space.

        Raises:
            TextError: a word is empty.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise TextError("a bad word is empty")
            for spelling in (word, f" {word.lstrip()}"):
                sequences[self._ids_inside(spelling)] = None
        return tuple(sequences)

    def _ids_inside(self, text: str) -> tuple[int, ...]:
        """Ids of a text that does not start the sequence (SentencePiece would put a space before it)."""
        before = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        if len(ids) > len(before) and ids[: len(before)] == before:
            return tuple(ids[len(before) :])
        return tuple(self.encode(text, add_special_tokens=False))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the model's template writes it. It brings the special tokens: encode it without them.

        The template runs in Jinja's immutable sandbox (transformers'), and messages are data to it, never templates.

        Args:
            template_kwargs: variables for the template, which a client may set.

        Raises:
            TextError: no template, a template's own objection (such as to the order of roles), or a reserved variable.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise TextError(
                "the model has no chat template; start the server with chat_template=FILE, or use completions"
            )
        reserved = sorted(_RESERVED_KWARGS & template_kwargs.keys())
        if reserved:
            raise TextError(f"chat template variables can't be named {', '.join(reserved)}")
        try:
            text: str = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_kwargs,
            )
        except (
            TemplateError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            ArithmeticError,
        ) as error:
            raise TextError(f"the chat template refuses the conversation: {first_line(error)}") from None
        return text


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Loads the tokenizer that the configuration asks for (takes seconds the first time for a GGUF file).

    Raises:
        BackendError: no tokenizer there, or it can't be read.
        ConfigError: the file of option chat_template can't be used.
    """
    return Tokenizer(load_hf_tokenizer(config))
