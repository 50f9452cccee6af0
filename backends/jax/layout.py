"""ParameterLayout: how every parameter is stored, cut and placed, known before any array exists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from backends.jax.model import Parameter, Params, parameters
from backends.jax.partition import Partition
from backends.jax.sharding import Axes, sharded_shape
from backends.jax.storage import Array, Storage, StoredArray, VectorStorage

ArrayShapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """A parameter, how it is stored, and what one chip holds of it (of one layer)."""

    parameter: Parameter
    storage: Storage
    shape: tuple[int, ...]  # of one chip's part, as a matrix [out, in] or a vector
    times: int  # layers that have one

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def arrays(self) -> Mapping[str, StoredArray]:
        return self.storage.stored(self.shape)

    @property
    def num_bytes(self) -> int:
        """What a chip holds of it, of all layers."""
        one_layer = sum(math.prod(array.shape) * array.dtype.itemsize for array in self.arrays.values())
        return one_layer * self.times

    def axes(self, array: str) -> Axes:
        """Logical axes of a stored array's dimensions."""
        dims = self.arrays[array].dims
        return tuple(None if dim is None else self.parameter.axes[dim] for dim in dims)

    def leaf(self, arrays: Mapping[str, Any]) -> Any:
        return self.storage.leaf(arrays, self.shape[0])


def stored_parameters(partition: Partition, storage: Storage) -> tuple[StoredParameter, ...]:
    """All parameters of a model in load order, as they are cut and stored; `storage` is that of matrices."""

    def stored(parameter: Parameter) -> StoredParameter:
        rows = sum(partition.local_size(source.axes[0]) for source in parameter.sources)
        rest = (partition.local_size(axis) for axis in parameter.axes[1:])
        return StoredParameter(
            parameter=parameter,
            storage=storage if parameter.is_matrix else VectorStorage(),
            shape=(rows, *rest),
            times=partition.model.num_layers if parameter.per_layer else 1,
        )

    return tuple(map(stored, parameters(partition.model)))


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """
    Args:
        storage: of matrices; vectors have their own.
        stacked: one array for all layers. Else a tuple of layers (XLA on CPU copies slices of stacked weights).
    """

    partition: Partition
    mesh: Mesh
    storage: Storage
    stacked: bool

    @property
    def num_layers(self) -> int:
        return self.partition.model.num_layers

    @cached_property
    def stored(self) -> tuple[StoredParameter, ...]:
        """All parameters in load order."""
        return stored_parameters(self.partition, self.storage)

    def shapes(self) -> Params:
        """The tree of parameters with ShapeDtypeStructs in place of arrays."""
        params = {p.name: p.leaf(self.whole_shapes(p)) for p in self.stored if not p.parameter.per_layer}
        per_layer = [p for p in self.stored if p.parameter.per_layer]
        if self.stacked:
            params["layers"] = {p.name: p.leaf(self.stack_shapes(p)) for p in per_layer}
        else:
            layer = {p.name: p.leaf(self.layer_shapes(p)) for p in per_layer}
            params["layers"] = (layer,) * self.num_layers
        return params

    def whole_shapes(self, p: StoredParameter) -> ArrayShapes:
        """Arrays of a parameter that belongs to no layer."""
        return self._shapes(p, (1,) if p.storage.always_stacked else ())

    def layer_shapes(self, p: StoredParameter) -> ArrayShapes:
        """Arrays of one layer's parameter."""
        return self._shapes(p, ())

    def stack_shapes(self, p: StoredParameter) -> ArrayShapes:
        """Arrays of all layers' parameter."""
        return self._shapes(p, (self.num_layers,))

    def _shapes(self, p: StoredParameter, lead: tuple[int, ...]) -> ArrayShapes:
        axes = ("layers",) * len(lead)
        return {
            name: sharded_shape(self.mesh, (*lead, *array.shape), (*axes, *p.axes(name)), array.dtype)
            for name, array in p.arrays.items()
        }

    def part(self, p: StoredParameter, name: str, encoded: Sequence[Array], chip: int) -> Array:
        """What a chip stores of array `name`, given that array of every source."""
        dims = p.storage.encoded_dims[name]
        parts = [
            self.partition.cut(array, [source.axes[dim] for dim in dims], chip)
            for array, source in zip(encoded, p.parameter.sources, strict=True)
        ]
        return p.storage.order(name, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def local_devices(self) -> Iterator[tuple[int, list[jax.Device]]]:
        """Each chip number of the model axis with those of its devices that belong to this process."""
        process = jax.process_index()
        for chip in range(self.partition.chips):
            devices = [d for d in self.mesh.devices[:, :, chip].flat if d.process_index == process]
            if devices:
                yield chip, devices
