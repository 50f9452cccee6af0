"""The device mesh, and the one table that maps logical axes of parameters to mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "model")

LOGICAL_TO_MESH: dict[str, str | None] = {
    "layers": None,
    "hidden": None,
    "vocab": "model",
    "heads": "model",  # query, key and value outputs; the attention output's inputs
    "mlp": "model",
}


def create_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of one data and one model axis; one device is a mesh of one."""
    chosen = list(devices) if devices is not None else jax.devices()[:1]
    return Mesh(np.array(chosen).reshape(1, len(chosen)), MESH_AXES)


def sharding(mesh: Mesh, axes: Sequence[str | None] = ()) -> NamedSharding:
    """Sharding of an array whose dimensions carry these logical names (None and missing ones: replicated)."""
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_TO_MESH[axis] if axis else None for axis in axes)))
