"""Weights in a GGUF file, dequantized to float32 one tensor at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quant_shape_to_byte_shape

from backends.jax.checkpoint.base import Checkpoint, Tensor
from backends.jax.model_config import ModelConfig
from engine.backend import BackendError
from engine.gguf_header import GGUFTensorInfo, read_gguf_header

_DECODERS = {"llama": MODEL_ARCH.LLAMA}


class GGUFCheckpoint(Checkpoint):
    """A memory-mapped GGUF file of the Llama family."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        super().__init__(config, str(path))
        self._config = config
        self._infos = self._find_tensors(path)
        for name, info in self._infos.items():
            self.check_shape(name, info.shape)
            _check_type(path, name, info)
        self._data = np.memmap(path, np.uint8, mode="r")

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in self._infos.values())

    def num_bytes(self, name: str) -> int:
        return self._infos[name].num_bytes

    def _find_tensors(self, path: Path) -> dict[str, GGUFTensorInfo]:
        tensors = read_gguf_header(path).tensors
        name_map = get_tensor_name_map(_DECODERS[self._config.architecture], self._config.num_layers)
        stored = {name: name_map.get_name(name, try_suffixes=(".weight", ".bias")) for name in self.names()}
        found = {name: tensors[alias] for name, alias in stored.items() if alias is not None and alias in tensors}
        self.check_names(set(found))
        return found

    def _read(self, name: str) -> Tensor:
        info = self._infos[name]
        kind = GGMLQuantizationType(info.ggml_type)
        packed = self._data[info.offset : info.offset + info.num_bytes]
        # dequantize() expects unquantized tensors in their own type and packed ones as bytes.
        if kind is GGMLQuantizationType.F32:
            array = packed.view(np.float32).reshape(info.shape)
        elif kind is GGMLQuantizationType.F16:
            array = packed.view(np.float16).reshape(info.shape).astype(np.float32)
        else:
            array = dequantize(packed.reshape(quant_shape_to_byte_shape(info.shape, kind)), kind)
        return self._unpermute(name, array)

    def _unpermute(self, name: str, array: Tensor) -> Tensor:
        """Undoes llama.cpp's order of q and k rows (its rope turns neighbours, Hugging Face's turns halves)."""
        if ".q_proj." in name:
            heads = self._config.num_heads
        elif ".k_proj." in name:
            heads = self._config.num_kv_heads
        else:
            return array
        pairs = array.reshape(heads, self._config.head_dim // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


def _check_type(path: Path, name: str, info: GGUFTensorInfo) -> None:
    kind = GGMLQuantizationType(info.ggml_type)
    if not _is_readable(kind):
        raise BackendError(
            f"{path}: tensor {name} is stored as {kind.name}, which can't be dequantized; "
            "take a file with a common type (F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K, …)"
        )


@cache
def _is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether _read can turn the type into float32, tried on one block of zeros (the gguf package has no list)."""
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return True
    block, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        return dequantize(np.zeros((1, block_bytes), np.uint8), kind).shape == (1, block)
    except NotImplementedError:
        return False
