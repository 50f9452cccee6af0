"""Whose KV it is: a digest of everything that KV depends on, beside the tokens.

Two engines may exchange KV only if their weights, the options that change what the weights compute, and the layout of
blocks are the same. A name does not say that (a folder's content changes, a hub's name comes to mean another
revision), so the weights' bytes are read whole: a fine-tuned model may differ in a few small tensors only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from engine.config import MODEL, EngineConfig
from engine.kv_blocks import KVFormat
from engine.model_files import ModelFiles, locate_model

SPACE_BYTES = 16
LAYOUT = 1
"""Of engine.kv_blocks.KVBlocks.data, and of how this package stores it: to be raised when either changes."""
HASH_THREADS = 4

_NOT_WEIGHTS = frozenset(
    {"model", "tokenizer", "tokenizer_mode", "trust_remote_code", "served_model_name", "chat_template"}
)
"""Options about the model that say where it is, or which tokens a text becomes, and not what tokens mean."""


def space_of(config: EngineConfig, kv_format: KVFormat) -> bytes:
    """The digest under which this engine's blocks are stored and found. Reads all weights: seconds per 10 GB.

    Raises:
        BackendError: the model is not where it was.
        OSError: its files can't be read.
    """
    content = {
        "layout": LAYOUT,
        "format": asdict(kv_format),
        "block_size": config.block_size,
        "options": {name: getattr(config, name) for name in _weight_options()},
        "weights": ["mock", config.model] if config.backend == "mock" else weights_digests(config),
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=SPACE_BYTES).digest()


def _weight_options() -> list[str]:
    """All of the model's options but those named above: a new one counts unless it is known not to."""
    extras = {name: field.json_schema_extra for name, field in EngineConfig.model_fields.items()}
    return [n for n, e in extras.items() if isinstance(e, dict) and e.get("group") == MODEL and n not in _NOT_WEIGHTS]


def weights_digests(config: EngineConfig) -> list[str]:
    """A digest for each file that decides what the model computes."""
    dummy = config.load_format == "dummy"
    files = sorted(_files(locate_model(config.model, weights=not dummy), dummy))
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(_digest, files))


def _files(model: ModelFiles, dummy: bool) -> Iterator[Path]:
    if model.kind == "gguf":
        yield model.path
        return
    yield model.path / "config.json"
    if not dummy:
        yield from model.path.glob("*.safetensors")


def _digest(file: Path) -> str:
    blob = file.resolve()
    if blob.parent.name == "blobs":  # the hub's cache: a file's name is the digest of its content
        return blob.name
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
