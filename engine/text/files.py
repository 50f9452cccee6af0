"""Where the tokenizer and chat template are, and whether they are there, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.gguf_header import read_gguf_header
from engine.model_files import ModelFiles, is_local, locate_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_OLDER_FILES = ("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken")


def check_text_files(config: EngineConfig) -> None:
    """Checks, without loading them, a tokenizer that lies on this machine and the chat template's file.

    Raises:
        BackendError, ConfigError: missing or of no use; one line.
    """
    if config.chat_template is not None:
        read_template(config.chat_template)
    name = config.tokenizer or config.model
    if not is_local(name):
        return
    if config.tokenizer is not None and not Path(name).expanduser().exists() and name != config.model:
        raise ConfigError(f"tokenizer={name}: nothing is there; give a folder, a .gguf file or a hub id (owner/name)")
    folder = Path(name).expanduser()
    wanted = (*_TOKENIZER_FILES, *_OLDER_FILES, "*.gguf")
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in wanted):
        raise BackendError(f"{name} holds no tokenizer (tokenizer.json); name one with tokenizer=FOLDER_OR_HUB_ID")
    files = locate_tokenizer(name)
    if files.kind == "gguf":
        require_tokens(files.path)


def locate_tokenizer(name: str) -> ModelFiles:
    """The files behind `tokenizer=name`, or behind `model=name` where there is no tokenizer option.

    Raises:
        BackendError: nothing there.
    """
    folder = Path(name).expanduser()
    if any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return ModelFiles(path=folder, kind="hf", source=name)
    return locate_model(name, weights=False)


def require_tokens(path: Path) -> None:
    """Raises BackendError unless a GGUF file holds a tokenizer."""
    if "tokenizer.ggml.tokens" not in read_gguf_header(path).metadata:
        raise BackendError(f"{path} holds no tokenizer; name one with tokenizer=FOLDER_OR_HUB_ID")


def read_template(name: str) -> str:
    """The text of the chat template's file.

    Raises:
        ConfigError: it can't be read.
    """
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"chat_template={path} can't be read: {reason}; give a Jinja file") from None
