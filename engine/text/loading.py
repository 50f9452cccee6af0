"""transformers' tokenizer for a configuration: from a folder, the hub, or a GGUF file (converted once, then cached)."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.errors import first_line
from engine.model_files import ModelFiles
from engine.text.files import locate_tokenizer, read_template, require_tokens
from engine.text.gguf_tokenizer import gguf_tokenizer

logger = logging.getLogger(__name__)

_CACHE = Path("~/.cache/sliceserve/tokenizers")
_CACHE_VERSION = "2"


def load_hf_tokenizer(config: EngineConfig) -> Any:
    """transformers' tokenizer with the chat template that the options ask for.

    Raises:
        BackendError: no tokenizer there, or it can't be read.
        ConfigError: the file of option chat_template can't be used.
    """
    files = locate_tokenizer(config.tokenizer or config.model)
    hf = _from_gguf(files, config) if files.kind == "gguf" else _from_folder(files.path, files.source, config)
    if config.tokenizer_mode == "slow" and hf.is_fast:
        logger.warning("tokenizer_mode=slow: transformers 5 has this tokenizer as a fast one only; that one is used")
    if config.chat_template is not None:
        hf.chat_template = _checked_template(config.chat_template, hf)
    return hf


def _from_folder(folder: Path, source: str, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, use_fast=config.tokenizer_mode == "auto", trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # anything at all comes out of damaged files and of tokenizers' own code
        if "trust_remote_code" in str(error):
            reason = "it runs code of its own; if you trust that, set trust_remote_code=true"
        else:
            reason = first_line(error)
        raise BackendError(f"the tokenizer of {source} can't be loaded: {reason}") from None


def _from_gguf(files: ModelFiles, config: EngineConfig) -> Any:
    """Converting takes some six seconds for 50,000 tokens, reading the result a third of one."""
    require_tokens(files.path)
    cached = _CACHE.expanduser() / _identity(files.path)
    if cached.is_dir():
        try:
            return _from_folder(cached, files.source, config)
        except BackendError:
            shutil.rmtree(cached, ignore_errors=True)  # damaged: convert again
    try:
        hf = gguf_tokenizer(files.path)
    except Exception as error:  # the converter trusts the metadata
        raise BackendError(f"the tokenizer of {files.source} can't be converted: {first_line(error)}") from None
    _store(hf, cached)
    return hf


def _identity(path: Path) -> str:
    import transformers

    stat = path.stat()
    parts = (_CACHE_VERSION, transformers.__version__, str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _store(hf: Any, folder: Path) -> None:
    """Renamed into place, since several processes may convert the same file at once. A read-only home is no error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            finished = Path(scratch) / "tokenizer"
            hf.save_pretrained(finished)
            os.rename(finished, folder)
    except OSError as error:
        logger.info("the converted tokenizer is not cached: %s", error)


def _checked_template(name: str, hf: Any) -> str:
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    template = read_template(name)
    try:
        hf.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template={name}, line {error.lineno}: {error.message}") from None
    except (TemplateError, TypeError, ValueError):
        pass  # it compiles, and may want other messages than this
    return template
