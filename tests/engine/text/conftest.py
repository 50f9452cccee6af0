"""Three tokenizers: the demo model's (byte-level BPE), a SentencePiece-like one, and one only decode() understands."""

from __future__ import annotations

import string

import pytest

from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer, load_tokenizer

CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return load_tokenizer(EngineConfig())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Built as transformers builds Llama 2's: byte fallback, a space put before the text, <s> before everything."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o")]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *string.ascii_letters,
        "é",
        "日",
    ]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A Unigram tokenizer whose decoder this project has no table for."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", *string.ascii_letters, "▁the", "▁hello", "日", "本", "🎉", "é"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
