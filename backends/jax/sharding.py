"""The device mesh, and the one table that maps logical axes of arrays to mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "expert", "model")
MODEL = "model"

LOGICAL_TO_MESH: dict[str, str | None] = {
    "layers": None,
    "hidden": None,
    "q_heads": MODEL,  # query outputs; the attention output's inputs
    "kv_heads": MODEL,  # key and value outputs
    "mlp": MODEL,
    "vocab": MODEL,
    "chips": MODEL,  # what each chip has of its own, one chip behind the other
}

Axes = Sequence[str | None]


def create_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh that has these devices (or, for a look ahead, a topology's) on its model axis."""
    return Mesh(np.array(devices).reshape(1, 1, len(devices)), MESH_AXES)


def sharding(mesh: Mesh, axes: Axes = ()) -> NamedSharding:
    """Sharding of an array whose dimensions carry these logical names (None and missing ones: replicated)."""
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_TO_MESH[axis] if axis else None for axis in axes)))


def sharded_shape(mesh: Mesh, local: Sequence[int], axes: Axes, dtype: Any) -> jax.ShapeDtypeStruct:
    """The whole of an array of which every chip holds `local`."""
    placed = sharding(mesh, axes)
    factors = [mesh.shape[name] if name else 1 for name in (*placed.spec, *[None] * (len(local) - len(placed.spec)))]
    shape = tuple(size * factor for size, factor in zip(local, factors, strict=True))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)


def bytes_per_device(shapes: Any) -> int:
    """What arrays of these shapes (a tree of ShapeDtypeStructs with shardings) take on each device."""
    leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves(shapes)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
