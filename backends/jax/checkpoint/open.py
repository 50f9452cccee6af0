"""The choice of a checkpoint reader from load_format and what is on disk."""

from __future__ import annotations

from backends.jax.checkpoint.base import Checkpoint
from backends.jax.checkpoint.dummy import DummyCheckpoint
from backends.jax.checkpoint.gguf import GGUFCheckpoint
from backends.jax.checkpoint.safetensors import SafetensorsCheckpoint
from backends.jax.model_config import ModelConfig
from engine.backend import BackendError
from engine.model_files import ModelFiles

_FORMATS = {"hf": "safetensors", "gguf": "gguf"}


def open_checkpoint(files: ModelFiles, config: ModelConfig, load_format: str, seed: int) -> Checkpoint:
    """Opens a model's weights and checks names, shapes, types and file sizes without reading them.

    Args:
        load_format: "auto" (what the files are), "safetensors", "gguf" or "dummy" (random weights).
        seed: of dummy weights.

    Raises:
        BackendError: the weights are incomplete, damaged, or not the config's; one line.
    """
    if load_format == "dummy":
        return DummyCheckpoint(config, seed)
    stored = _FORMATS[files.kind]
    if load_format not in ("auto", stored):
        raise BackendError(f"load_format={load_format}, but {files.source} holds {stored}; use load_format=auto")
    if files.kind == "gguf":
        return GGUFCheckpoint(config, files.path)
    return SafetensorsCheckpoint(config, files.path)
