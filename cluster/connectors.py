"""Which KVConnector an engine replica has: what it is depends on the replica's role and on options."""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.balancer import Balancer
from cluster.kv_transfer.decode_connector import DecodeConnector
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.prefill_connector import PrefillConnector
from cluster.kv_transfer.prefill_pool import ServePrefillPool
from cluster.kv_transfer.table import TransferTable
from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.metrics_text import ReplicaLabels
from cluster.prefix_store.connector import PrefixStoreConnector
from cluster.prefix_store.ray_client import RayStoreClient
from cluster.prefix_store.store_first import StoreFirst
from cluster.roles import Role
from engine.backend import Backend
from engine.config import GIB, EngineConfig
from engine.kv_connector import KVConnector
from engine.pools import prefill_config


def create_connector(
    config: EngineConfig,
    replica: ReplicaLabels,
    *,
    backend: Backend,
    prefill: DeploymentHandle[Any] | None = None,
    transfers: TransferTable | None = None,
) -> KVConnector | None:
    """The connector of one replica, or None if no KV comes to it or leaves it.

    Args:
        backend: asked for its KV format once it is loaded (`KVConnector.attach`).
        prefill: the pool that a decode replica asks.
        transfers: where a prefill replica's KV goes.
    """
    pools = _pools_connector(config, replica, backend, prefill, transfers)
    if config.kv_store is None:
        return pools
    capacity = None if config.kv_store_gib is None else int(config.kv_store_gib * GIB)
    client = RayStoreClient(replica.application, replica.replica, capacity, reads_here=config.num_hosts == 1)
    store = PrefixStoreConnector(config, backend, client)
    return store if pools is None else StoreFirst(store, pools)


def _pools_connector(
    config: EngineConfig,
    replica: ReplicaLabels,
    backend: Backend,
    prefill: DeploymentHandle[Any] | None,
    transfers: TransferTable | None,
) -> KVConnector | None:
    if transfers is not None:
        return PrefillConnector(transfers)
    if prefill is not None:
        return _decode_connector(config, replica, backend, prefill)
    return None


def _decode_connector(
    config: EngineConfig, replica: ReplicaLabels, backend: Backend, prefill: DeploymentHandle[Any]
) -> DecodeConnector:
    return DecodeConnector(
        replica.replica,
        backend,
        lambda: ServePrefillPool(prefill, Balancer.of(prefill_config(config), hears_news=False)),
        ObjectStoreTransport.of(config),
        PrefillThreshold(config.disagg_min_prefill_tokens),
        TransferMetrics(Role.DECODE),
        max_bytes=config.kv_transfer_max_mib * MIB,
        timeout_s=config.kv_transfer_timeout_s,
    )
