"""Streams of ids become the same text as decoding all at once, in complete characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

TEXTS = {
    "emoji family": "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "cjk": "日本語と中文、한국어。",
    "combining marks": unicodedata.normalize("NFD", "Ångström é à la crème, Việt Nam"),
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "indic and thai": "नमस्ते दुनिया ภาษาไทย",
    "spaces": "  two  leading,\n\n\ttabs and trailing  ",
    "code": "def f(x):\n    return {'a': [1, 2]}  # done\n",
    "specials": "<|im_start|>user\nHi<|im_end|>\n",
    "replacement character itself": "a\ufffdb\ufffd",
    "empty": "",
}


def stream(tokenizer: Tokenizer, pushes: Sequence[Sequence[int]], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def one_by_one(tokenizer: Tokenizer, ids: Sequence[int], **options: bool) -> list[str]:
    return stream(tokenizer, [[i] for i in ids], **options)


@st.composite
def split(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("name", ["demo", "sentencepiece"])
def test_text_streamed_token_by_token_is_the_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = one_by_one(tokenizer, ids, skip_special_tokens=False)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data(), ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_byte_level_ids_split_anyhow_give_the_full_decode(
    demo: Tokenizer, data: st.DataObject, ids: list[int], skip: bool
) -> None:
    pieces = stream(demo, data.draw(split(ids)), skip_special_tokens=skip)
    assert "".join(pieces) == demo.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), bytes_=st.binary(max_size=24))
@settings(max_examples=150, deadline=None)
def test_any_bytes_in_byte_level_tokens_give_the_full_decode(
    demo: Tokenizer, data: st.DataObject, bytes_: bytes
) -> None:
    id_of = {token: i for i, token in demo.table.tokens.items() if len(token) == 1}
    ids = [id_of[bytes([b])] for b in bytes_ if bytes([b]) in id_of]
    assert "".join(stream(demo, data.draw(split(ids)))) == demo.decode(ids)


@given(data=st.data(), text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["demo", "sentencepiece"])
def test_any_text_comes_back(name: str, data: st.DataObject, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, data.draw(split(ids)), skip_special_tokens=False)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_sentencepiece_ids_split_anyhow_give_the_full_decode(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    """Runs of byte tokens are whole characters here; the next test has the others."""
    table = sentencepiece.table
    words = st.sampled_from(sorted(table.tokens.keys() - table.byte_ids)).map(lambda i: [i])
    characters = st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()])
    ids = [i for part in data.draw(st.lists(words | characters, max_size=20)) for i in part]
    skip = data.draw(st.booleans())
    pieces = stream(sentencepiece, data.draw(split(ids)), skip_special_tokens=skip)
    assert "".join(pieces) == sentencepiece.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), ids=st.lists(st.integers(3, 258), max_size=12))
@settings(max_examples=150, deadline=None)
def test_byte_tokens_that_are_not_utf8_keep_what_was_sent_and_replace_the_rest(
    sentencepiece: Tokenizer, data: st.DataObject, ids: list[int]
) -> None:
    text = "".join(stream(sentencepiece, data.draw(split(ids))))
    raw = bytes(i - 3 for i in ids)
    try:
        expected = raw.decode()
    except UnicodeDecodeError as error:
        expected = raw[: error.start].decode() + "\ufffd" * (len(raw) - error.start)
    assert text == expected.removeprefix(" ")


def test_sentencepiece_takes_the_first_space_only_at_the_beginning_of_a_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello the", add_special_tokens=False)
    assert one_by_one(sentencepiece, ids) == ["hello", " the", ""]
    assert one_by_one(sentencepiece, ids, after_prompt=True) == [" hello", " the", ""]


def test_special_tokens_are_left_out_or_written(demo: Tokenizer) -> None:
    ids = demo.encode("Hi<|im_end|>\n")
    assert "".join(one_by_one(demo, ids)) == "Hi\n"
    assert "".join(one_by_one(demo, ids, skip_special_tokens=False)) == "Hi<|im_end|>\n"


def test_an_incomplete_character_is_held_and_replaced_at_the_end(demo: Tokenizer) -> None:
    ids = demo.encode("👩")
    assert len(ids) > 1
    assert one_by_one(demo, ids[:-1]) == ["" for _ in ids[:-1]] + ["\ufffd"]


def test_ids_of_the_models_padding_rows_have_no_text(demo: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (demo, sentencepiece):
        assert one_by_one(tokenizer, [tokenizer.vocab_size + 5]) == ["", ""]


@given(data=st.data(), ids=st.lists(st.integers(1, 62), max_size=30))
@settings(max_examples=100, deadline=None)
def test_other_decoders_are_followed_by_a_window(metaspace: Tokenizer, data: st.DataObject, ids: list[int]) -> None:
    assert "".join(stream(metaspace, data.draw(split(ids)))) == metaspace.decode(ids)
