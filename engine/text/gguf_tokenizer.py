"""A transformers tokenizer from a GGUF file's metadata, without PyTorch.

transformers' own entry, `AutoTokenizer.from_pretrained(gguf_file=…)`, reads the file through PyTorch; its converter
behind that needs none. The names used here are not part of transformers' public interface; a test compares the result
with what its entry gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.gguf_header import read_gguf_header

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(path: Path) -> Any:
    """The fast tokenizer that the file describes, with its chat template.

    Raises:
        Exception: whatever the converter raises when the metadata is damaged or of an unknown kind.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    header = read_gguf_header(path)
    metadata = header.metadata
    groups: dict[str, dict[str, Any]] = {
        group: {name: metadata[f"tokenizer.{key}"] for key, name in keys.items() if f"tokenizer.{key}" in metadata}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    tokenizer, options = groups["tokenizer"], groups["tokenizer_config"]
    if tokenizer.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp does
    for name, key in _SPECIAL_TOKENS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        options[name] = None if index is None else tokenizer["tokens"][index]
    backend, _ = convert_gguf_tokenizer(header.architecture, tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)  # type: ignore[no-untyped-call]
