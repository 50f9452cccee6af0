"""From a checkpoint to the decoder's parameters, tensor by tensor: never two full copies of the weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from backends.jax import native
from backends.jax.checkpoint import Checkpoint
from backends.jax.model import Parameter, Params, parameters
from backends.jax.model_config import ModelConfig
from backends.jax.sharding import sharding
from backends.jax.weights import DenseWeight, PackedWeight
from engine.backend import Progress

Array = NDArray[Any]
MIB = 1 << 20
ALIGNMENT = 64
"""Bytes; an array so aligned becomes a CPU device array without a copy."""


class ParameterLoader:
    """Reads parameters in the storage that the chosen kernels want.

    Args:
        packed: for the native CPU kernels. Else dense, for XLA.
        stacked: one array for all layers. Else a tuple of layers (XLA on CPU copies slices of stacked weights).
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, mesh: Mesh, *, dtype: str, packed: bool, stacked: bool
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float32)
        self._packed = packed
        self._stacked = stacked

    def load(self, progress: Progress) -> Params:
        """Reads everything, a parameter at a time.

        Raises:
            BackendError: a tensor can't be read or has the wrong shape.
        """
        done, total = 0, self._checkpoint.total_bytes

        def advance(tensor: str) -> None:
            nonlocal done
            done += self._checkpoint.num_bytes(tensor)
            progress("reading weights", done // MIB, total // MIB, f"MiB, {tensor}")

        specs = parameters(self._config)
        params: dict[str, Any] = {p.name: self._whole(p, advance) for p in specs if not p.per_layer}
        per_layer = [p for p in specs if p.per_layer]
        if self._stacked:
            params["layers"] = {p.name: self._stack(p, advance) for p in per_layer}
        else:
            params["layers"] = tuple(
                {p.name: self._one_layer(p, layer, advance) for p in per_layer}
                for layer in range(self._config.num_layers)
            )
        return params

    def _whole(self, parameter: Parameter, advance: Callable[[str], None]) -> Any:
        value = self._storage(parameter, self._read(parameter, parameter.tensors, advance))
        return self._leaf(parameter, value[None] if self._is_packed(parameter) else value, ())

    def _one_layer(self, parameter: Parameter, layer: int, advance: Callable[[str], None]) -> Any:
        return self._leaf(parameter, self._storage(parameter, self._read_layer(parameter, layer, advance)), ())

    def _stack(self, parameter: Parameter, advance: Callable[[str], None]) -> Any:
        first = self._storage(parameter, self._read_layer(parameter, 0, advance))
        stack = aligned_empty((self._config.num_layers, *first.shape), first.dtype)
        stack[0] = first
        for layer in range(1, self._config.num_layers):
            stack[layer] = self._storage(parameter, self._read_layer(parameter, layer, advance))
        return self._leaf(parameter, stack, ("layers",))

    def _read_layer(self, parameter: Parameter, layer: int, advance: Callable[[str], None]) -> Array:
        return self._read(parameter, tuple(f"model.layers.{layer}.{name}" for name in parameter.tensors), advance)

    def _read(self, parameter: Parameter, names: tuple[str, ...], advance: Callable[[str], None]) -> Array:
        dtype = self._dtype if parameter.kind == "matrix" else np.dtype(np.float32)
        parts = []
        for name in names:
            parts.append(self._checkpoint.tensor(name).astype(dtype, copy=False))
            advance(name)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _is_packed(self, parameter: Parameter) -> bool:
        return self._packed and parameter.kind == "matrix"

    def _storage(self, parameter: Parameter, value: Array) -> Array:
        return native.pack_weight(value) if self._is_packed(parameter) else value

    def _leaf(self, parameter: Parameter, value: Array, leading: tuple[str, ...]) -> Any:
        if parameter.kind == "vector":
            return jax.device_put(value, sharding(self._mesh, (*leading, *parameter.axes)))
        if not self._packed:
            return DenseWeight(data=jax.device_put(value, sharding(self._mesh, (*leading, *parameter.axes))))
        data = jax.device_put(value, sharding(self._mesh, ("layers", parameter.axes[0])))
        return PackedWeight(data=data, layer=jnp.int32(0), out_features=self._out_features(parameter))

    def _out_features(self, parameter: Parameter) -> int:
        prefix = "model.layers.0." if parameter.per_layer else ""
        return sum(self._checkpoint.shapes[prefix + name][0] for name in parameter.tensors)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that starts at a multiple of ALIGNMENT."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
