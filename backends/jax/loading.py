"""From a checkpoint to the decoder's parameters on the devices: layer by layer, each chip's part straight to its chip.

The host holds one parameter of one layer at a time, a device the parameters and one such part. Only devices of this
process are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax.checkpoint import Checkpoint
from backends.jax.layout import ArrayShapes, ParameterLayout, StoredParameter
from backends.jax.model import Params
from backends.jax.storage import Array
from engine.backend import BackendError, Progress

MIB = 1 << 20


class ParameterLoader:
    """Reads parameters into the storage, shapes and shardings that a layout says."""

    def __init__(self, layout: ParameterLayout, checkpoint: Checkpoint, progress: Progress) -> None:
        self._layout = layout
        self._checkpoint = checkpoint
        self._progress = progress
        self._done = 0
        self._write_layer = jax.jit(_write_layer, donate_argnums=0)

    def load(self) -> Params:
        """Reads everything, a layer at a time.

        Raises:
            BackendError: a tensor can't be read, has the wrong shape, or can't be quantized.
        """
        layout = self._layout
        whole = [p for p in layout.stored if not p.parameter.per_layer]
        per_layer = [p for p in layout.stored if p.parameter.per_layer]
        params = {p.name: p.leaf(self._read(p, "", layout.whole_shapes(p))) for p in whole}
        params["layers"] = self._stacked(per_layer) if layout.stacked else self._unrolled(per_layer)
        return params

    def _unrolled(self, stored: list[StoredParameter]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {p.name: p.leaf(self._read_layer(p, layer)) for p in stored} for layer in range(self._layout.num_layers)
        )

    def _stacked(self, stored: list[StoredParameter]) -> dict[str, Any]:
        stacks = {p.name: {n: _zeros(s) for n, s in self._layout.stack_shapes(p).items()} for p in stored}
        for layer in range(self._layout.num_layers):
            for p in stored:
                stack = stacks[p.name]
                for name, array in self._read_layer(p, layer).items():
                    stack[name] = self._write_layer(stack[name], array, np.int32(layer))
                jax.block_until_ready(stack)  # host buffers live until their copies are done
        return {p.name: p.leaf(stacks[p.name]) for p in stored}

    def _read_layer(self, p: StoredParameter, layer: int) -> dict[str, jax.Array]:
        return self._read(p, f"model.layers.{layer}.", self._layout.layer_shapes(p))

    def _read(self, p: StoredParameter, prefix: str, shapes: ArrayShapes) -> dict[str, jax.Array]:
        """A parameter's arrays, each of the given shape and sharding."""
        encoded = [self._encode(p, prefix + source.tensor) for source in p.parameter.sources]

        def part_of(name: str) -> Callable[[int], Array]:
            return lambda chip: self._layout.part(p, name, [arrays[name] for arrays in encoded], chip)

        return {name: self._place(shape, part_of(name)) for name, shape in shapes.items()}

    def _encode(self, p: StoredParameter, name: str) -> Mapping[str, Array]:
        tensor = self._checkpoint.tensor(name)
        try:
            encoded = p.storage.encode(tensor)
        except ValueError as error:
            raise BackendError(f"{self._checkpoint.source}: tensor {name} can't be stored: {error}") from None
        self._done += self._checkpoint.num_bytes(name)
        self._progress("reading weights", self._done // MIB, self._checkpoint.total_bytes // MIB, f"MiB, {name}")
        return encoded

    def _place(self, shape: jax.ShapeDtypeStruct, part_of_chip: Callable[[int], Array]) -> jax.Array:
        """An array over the mesh from what each chip holds of it."""
        assert shape.sharding is not None
        local = shape.sharding.shard_shape(shape.shape)
        arrays = []
        for chip, devices in self._layout.local_devices():
            part = part_of_chip(chip).reshape(local)
            arrays += [jax.device_put(part, device) for device in devices]
        return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, arrays)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    zeros: jax.Array = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()
    return zeros


def _write_layer(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    updated: jax.Array = jax.lax.dynamic_update_index_in_dim(stack, array, layer, axis=0)
    return updated
