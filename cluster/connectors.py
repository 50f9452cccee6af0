"""Which KVConnector an engine replica has: what it is depends on the replica's role and on options."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.metrics_text import ReplicaLabels
from cluster.roles import Role
from engine.backend import Backend
from engine.config import EngineConfig
from engine.kv_connector import KVConnector


def create_connector(
    config: EngineConfig,
    role: Role,
    replica: ReplicaLabels,
    *,
    backend: Backend,
    prefill: DeploymentHandle[Any] | None = None,
) -> KVConnector | None:
    """The connector of one replica, or None if no KV comes to it or leaves it.

    Args:
        backend: asked for its KV format once it is loaded (`KVConnector.attach`).
        prefill: the pool that a decode replica asks.
    """
    del config, role, replica, backend, prefill
    return None
