"""Where tokenizers come from: the options, the cache of converted GGUF ones, and what is said when there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest

from engine.backend import BackendError
from engine.config import EngineConfig
from engine.model_files import ModelNotFoundError
from engine.text.token_table import byte_level_alphabet
from engine.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(sentencepiece: Tokenizer, tmp_path: Path) -> Path:
    sentencepiece._hf.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def cached(home: Path) -> list[Path]:
    return sorted((home / ".cache/sliceserve/tokenizers").iterdir())


def small_gguf(file: Path) -> Path:
    """A byte-level tokenizer of all bytes and two specials, as GGUF stores it."""
    writer = gguf.GGUFWriter(file, "llama")
    alphabet = byte_level_alphabet()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|start|>", "<|end|>", *alphabet, alphabet[ord("h")] + alphabet[ord("i")]])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineConfig(model=str(small_gguf(tmp_path / "small.gguf")))
    first = load_tokenizer(config)
    (entry,) = cached(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gguf.GGUFReader.__init__", lambda *_, **__: pytest.fail("converted again"))
        second = load_tokenizer(config)
    text = "hi 日本 1234\n\n👩‍👩‍👧<|end|>"
    ids = first.encode(text)
    assert first.decode(ids, skip_special_tokens=False) == text
    assert first.decode(ids) == text.removesuffix("<|end|>")
    assert first.eos_token_ids == (1,)
    chat = [{"role": "user", "content": "hi"}]
    assert first.apply_chat_template(chat) == "<|start|>hi<|end|>"
    for other in (second, damage(entry) or load_tokenizer(config)):
        assert other.encode(text) == ids
        assert other.decode(ids) == first.decode(ids)
        assert other.eos_token_ids == (1,)
        assert other.apply_chat_template(chat) == first.apply_chat_template(chat)
    assert cached(tmp_path) == [entry]


def damage(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def test_a_home_that_can_not_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").write_text("a file where the folder should be")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_tokenizer(EngineConfig(model=str(small_gguf(tmp_path / "small.gguf")))).encode("hi")


def test_a_gguf_file_without_tokenizer_says_which_option_helps(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(BackendError, match=r"bare\.gguf holds no tokenizer; name one with tokenizer="):
        load_tokenizer(EngineConfig(model=str(tmp_path / "bare.gguf")))


def test_the_tokenizer_option_wins_over_the_models(folder: Path) -> None:
    tokenizer = load_tokenizer(EngineConfig(tokenizer=str(folder)))
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1


def test_slow_mode_says_that_only_a_fast_one_exists(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_tokenizer(EngineConfig(tokenizer=str(folder), tokenizer_mode="slow"))
    assert "tokenizer_mode=slow" in caplog.text


def test_a_damaged_tokenizer_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(BackendError, match=r"the tokenizer of .*can't be loaded: ") as caught:
        load_tokenizer(EngineConfig(tokenizer=str(folder)))
    assert "\n" not in str(caught.value)


def test_a_model_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BackendError, match=r"the tokenizer of .*can't be loaded: ") as caught:
        load_tokenizer(EngineConfig(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        load_tokenizer(EngineConfig(tokenizer=str(tmp_path / "nothing")))


def test_a_tokenizer_with_code_of_its_own_asks_for_trust(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", null]}}'
    )
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    with pytest.raises(BackendError, match="trust_remote_code=true"):
        load_tokenizer(EngineConfig(tokenizer=str(tmp_path)))
    assert load_tokenizer(EngineConfig(tokenizer=str(tmp_path), trust_remote_code=True)).encode("hello")
