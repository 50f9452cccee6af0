"""Encoding, single tokens and bad words agree with transformers; beginning-of-sequence tokens are never doubled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.model_files import locate_model
from engine.text.tokenizer import TextError, Tokenizer

TEXTS = [
    "The capital of France is",
    "  Two  spaces\n\n\tand a tab ",
    "日本語 👩‍👩‍👧 naïve café e\u0301 مرحبا",
    "<|im_start|>user\nHi<|im_end|>\n",
    "x = {'a': 1234567890}",
    "",
]


@pytest.fixture(scope="session")
def reference() -> Any:
    """transformers' own reading of the demo's GGUF file, without this project's cache."""
    from transformers import AutoTokenizer

    path = locate_model("smollm2").path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_are_those_of_transformers(demo: Tokenizer, reference: Any, text: str, special: bool) -> None:
    ids = demo.encode(text, add_special_tokens=special)
    assert ids == reference.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert demo.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_is_tokenized_as_transformers_does(demo: Tokenizer, reference: Any, add_generation_prompt: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    messages.append({"role": "user", "content": "Bye {{ 7 * 7 }} {% raw %}"})
    text = demo.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert demo.encode(text, add_special_tokens=False) == expected


def test_vocabulary_and_end_of_sequence_come_from_the_model(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.eos_token_ids == (2,)


def test_the_bytes_of_all_tokens_put_together_are_the_text(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    text = "Hello, 日本 👩‍👩‍👧 é"
    assert b"".join(demo.token_bytes(i) for i in demo.encode(text)) == text.encode()
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert b"".join(sentencepiece.token_bytes(i) for i in ids) == f" {text}".replace(",", ",").encode()


def test_a_tokens_text_is_what_it_adds(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    first, second = demo.encode("hello world")
    assert (demo.token_text(first), demo.token_text(second)) == ("hello", " world")
    assert demo.token_text(2) == "<|im_end|>"
    assert demo.token_text(demo.encode("👩")[0]) == "\ufffd"
    assert demo.token_bytes(10**6) == b""
    (the,) = sentencepiece.encode("the", add_special_tokens=False)
    assert sentencepiece.token_text(the) == " the"
    assert sentencepiece.token_text(3 + 0xE2) == "\ufffd"


def test_other_tokenizers_have_texts_too(metaspace: Tokenizer) -> None:
    assert metaspace.token_text(metaspace.encode("日")[-1]) == "日"


def test_the_beginning_of_sequence_is_never_doubled(sentencepiece: Tokenizer) -> None:
    once = sentencepiece.encode("hello")
    assert once[0] == 1
    assert once[1] != 1
    templated = sentencepiece.apply_chat_template([{"role": "user", "content": "hello"}])
    assert templated.startswith("<s>")
    for special in (True, False):
        ids = sentencepiece.encode(templated, add_special_tokens=special)
        assert ids.count(1) == 1


def test_bad_words_are_banned_with_and_without_a_space_before(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    hello = tuple(demo.encode("hello", add_special_tokens=False))
    spaced = tuple(demo.encode(" hello", add_special_tokens=False))
    assert demo.bad_word_ids(["hello"]) == (hello, spaced)
    written = [sentencepiece.decode(ids) for ids in sentencepiece.bad_word_ids(["hello"])]
    assert written == ["hello", "hello"]
    inside, start = sentencepiece.bad_word_ids(["hello"])
    assert start == tuple(sentencepiece.encode("hello", add_special_tokens=False))
    assert sentencepiece.token_text(inside[0])[0] == "h"
    with pytest.raises(TextError, match="empty"):
        demo.bad_word_ids([" "])


def test_half_a_surrogate_pair_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate"):
        demo.encode("a\ud800b")


def test_importing_the_room_is_light() -> None:
    code = (
        "import sys, engine.text.tokenizer, engine.text.detokenizer, engine.text.stop\n"
        "assert not {'torch', 'transformers', 'jax', 'ray'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
