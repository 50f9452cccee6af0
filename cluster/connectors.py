"""Which KVConnector an engine replica has: what it is depends on the replica's role and on options."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.roles import Role
from engine.backend import Backend
from engine.config import EngineConfig
from engine.kv_connector import KVConnector


def create_connector(
    config: EngineConfig,
    role: Role,
    *,
    backend: Backend,  # noqa: ARG001
    application: str,  # noqa: ARG001
    replica: str,  # noqa: ARG001
    prefill: DeploymentHandle[Any] | None,  # noqa: ARG001
) -> KVConnector | None:
    """The connector of one replica, or None if no KV comes to it or leaves it.

    Args:
        backend: asked for its KV format once it is loaded (`KVConnector.attach`).
        replica: unique id.
        prefill: the pool that a decode replica asks.
    """
    del config, role
    return None
