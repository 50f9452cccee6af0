"""Weights in safetensors files: one, or shards listed in model.safetensors.index.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from backends.jax.checkpoint.base import Checkpoint, Tensor
from backends.jax.model_config import ModelConfig
from engine.backend import BackendError

INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported tensor types in safetensors' words."""


class SafetensorsCheckpoint(Checkpoint):
    """Memory-mapped safetensors files. All headers are checked when it is opened."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        super().__init__(config, str(folder))
        self._handles: dict[str, Any] = {}
        for path in _weight_files(folder):
            handle = _open(path)
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        if not config.tie_embeddings and "lm_head.weight" not in self._handles:
            raise BackendError(
                f"{folder}: tensor lm_head.weight missing; if the model ties it to the embedding, set "
                '"tie_word_embeddings": true in config.json'
            )
        self.check_names(set(self._handles))
        self._bytes = {name: self._check(name) for name in self.names()}

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())

    def num_bytes(self, name: str) -> int:
        return self._bytes[name]

    def _read(self, name: str) -> Tensor:
        try:
            array: Tensor = self._handles[name].get_tensor(name)
        except SafetensorError as error:
            raise BackendError(f"{self.source}: tensor {name} can't be read: {error}") from None
        return array

    def _check(self, name: str) -> int:
        """Checks type and shape from the header; returns the tensor's bytes."""
        entry = self._handles[name].get_slice(name)
        dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
        if dtype not in _ITEM_BYTES:
            raise BackendError(
                f"{self.source}: tensor {name} is stored as {dtype}; supported: {', '.join(_ITEM_BYTES)}"
            )
        self.check_shape(name, shape)
        count = _ITEM_BYTES[dtype]
        for dim in shape:
            count *= dim
        return count


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        return [_shard(folder, name) for name in _shard_names(index)]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        hint = "only pickled weights (.bin): convert them to safetensors" if pickled else "no *.safetensors files"
        raise BackendError(f"{folder} holds {hint}")
    return files


def _shard_names(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BackendError(f"{index} is damaged: no JSON object with a weight_map; download it again") from None


def _shard(folder: Path, name: str) -> Path:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise BackendError(f"{folder}: shard {name}, listed in {INDEX_FILE}, is missing; download it again")
    return path


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        size = path.stat().st_size
        raise BackendError(f"{path} is damaged or cut off ({size} bytes): {error}; download it again") from None
    except OSError as error:
        raise BackendError(f"{path} can't be read: {error.strerror or error}") from None
