"""Storage: the one place where a checkpoint's tensors become the leaves that the kernels read.

A tensor is first encoded as a whole (converted, quantized), then cut into chips' parts, then each part is put into its
final order. Encoded arrays keep the tensor's axes, so that one rule cuts them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from backends.jax import native
from backends.jax.quantize import quantize_rows
from backends.jax.weights import DenseWeight, PackedInt8Weight, PackedWeight, QuantizedWeight

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """One array of a leaf, as a chip holds it: its shape, and which of the tensor's axes its dimensions go along."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[int | None, ...]


_MATRIX = {"data": (0, 1)}
_QUANTIZED = {"data": (0, 1), "scale": (0,)}
_FLOAT32, _INT8 = np.dtype(np.float32), np.dtype(np.int8)


class Storage(ABC):
    """How parameters of one kind are kept on the devices."""

    always_stacked: ClassVar[bool] = False
    """Whether parameters that belong to no layer have a layer axis, too (of one layer)."""

    encoded_dims: ClassVar[Mapping[str, tuple[int, ...]]]
    """Which of the tensor's axes each encoded array has. Parts of several tensors are joined along the first."""

    @abstractmethod
    def encode(self, tensor: Array) -> Mapping[str, Array]:
        """A whole tensor -> the leaf's arrays."""

    @abstractmethod
    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        """What a chip's part of this shape is stored as."""

    def order(self, name: str, part: Array) -> Array:  # noqa: ARG002
        """A chip's part of the encoded array `name` in its final order."""
        return part

    @abstractmethod
    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> Any:
        """The leaf that holds these arrays (or their shapes); out_features of one chip."""


@dataclass(frozen=True, kw_only=True)
class VectorStorage(Storage):
    """Norms and biases: float32 arrays, no leaf type."""

    encoded_dims: ClassVar[Mapping[str, tuple[int, ...]]] = {"data": (0,)}

    def encode(self, tensor: Array) -> Mapping[str, Array]:
        return {"data": tensor.astype(np.float32, copy=False)}

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        return {"data": StoredArray(shape=shape, dtype=_FLOAT32, dims=(0,))}

    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> Any:  # noqa: ARG002
        return arrays["data"]


@dataclass(frozen=True, kw_only=True)
class DenseStorage(Storage):
    """Matrices as they are, for XLA and the TPU."""

    dtype: np.dtype[Any]
    encoded_dims: ClassVar[Mapping[str, tuple[int, ...]]] = _MATRIX

    def encode(self, tensor: Array) -> Mapping[str, Array]:
        return {"data": tensor.astype(self.dtype, copy=False)}

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        return {"data": StoredArray(shape=shape, dtype=self.dtype, dims=(0, 1))}

    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> DenseWeight:  # noqa: ARG002
        return DenseWeight(data=arrays["data"])


@dataclass(frozen=True, kw_only=True)
class PackedStorage(Storage):
    """Matrices in the order of the native CPU kernels."""

    dtype: np.dtype[Any]
    encoded_dims: ClassVar[Mapping[str, tuple[int, ...]]] = _MATRIX
    always_stacked: ClassVar[bool] = True

    def encode(self, tensor: Array) -> Mapping[str, Array]:
        return {"data": tensor.astype(self.dtype, copy=False)}

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        packed = native.packed_shape(shape[0], shape[1], self.dtype.itemsize)
        bits = np.dtype(np.uint16) if self.dtype == ml_dtypes.bfloat16 else self.dtype
        return {"data": StoredArray(shape=packed, dtype=bits, dims=(0, 1, None, None))}

    def order(self, name: str, part: Array) -> Array:  # noqa: ARG002
        return native.pack_weight(part)

    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> PackedWeight:
        return PackedWeight(data=arrays["data"], out_features=out_features)


class QuantizingStorage(Storage):
    """int8 and a scale per output, quantized from whole channels, so that chips hold parts of what one would hold."""

    encoded_dims: ClassVar[Mapping[str, tuple[int, ...]]] = _QUANTIZED

    def encode(self, tensor: Array) -> Mapping[str, Array]:
        data, scale = quantize_rows(tensor)
        return {"data": data, "scale": scale}


@dataclass(frozen=True, kw_only=True)
class Int8Storage(QuantizingStorage):
    """int8 matrices as they are, for XLA and the TPU; multiplied in `dtype`."""

    dtype: np.dtype[Any]

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        return {
            "data": StoredArray(shape=shape, dtype=_INT8, dims=(0, 1)),
            "scale": StoredArray(shape=shape[:1], dtype=_FLOAT32, dims=(0,)),
        }

    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> QuantizedWeight:  # noqa: ARG002
        return QuantizedWeight(data=arrays["data"], scale=arrays["scale"], dtype=self.dtype.name)


@dataclass(frozen=True, kw_only=True)
class PackedInt8Storage(QuantizingStorage):
    """int8 matrices in the order of the native CPU kernels; float32 activations are multiplied exactly."""

    dtype: np.dtype[Any]
    always_stacked: ClassVar[bool] = True

    def stored(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        packed = native.packed_shape(shape[0], shape[1], _INT8.itemsize)
        return {
            "data": StoredArray(shape=packed, dtype=_INT8, dims=(0, 1, None, None)),
            "scale": StoredArray(shape=(packed[0], native.BLOCK), dtype=_FLOAT32, dims=(0, None)),
        }

    def order(self, name: str, part: Array) -> Array:
        return native.pack_weight(part) if name == "data" else native.pack_scales(part)

    def leaf(self, arrays: Mapping[str, Any], out_features: int) -> PackedInt8Weight:
        exact = self.dtype == _FLOAT32
        return PackedInt8Weight(data=arrays["data"], scale=arrays["scale"], out_features=out_features, exact=exact)


def choose_storage(dtype: str, quantization: str | None, *, packed: bool) -> Storage:
    """How matrices are kept.

    Args:
        dtype: "bfloat16" or "float32", of what is not quantized.
        quantization: None or "int8".
        packed: for the native CPU kernels.
    """
    item = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    if quantization == "int8":
        return PackedInt8Storage(dtype=item) if packed else Int8Storage(dtype=item)
    return PackedStorage(dtype=item) if packed else DenseStorage(dtype=item)
