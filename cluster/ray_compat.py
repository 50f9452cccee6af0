"""Every underscore, alpha or developer API of Ray that SliceServe uses: an upgrade of Ray is checked in one place.

tests/cluster/test_ray_compat.py is the contract: it fails when a new Ray changes any of these.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve import context as serve_context
from ray.serve._private.constants import SERVE_PROXY_NAME
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.util.tpu import SlicePlacementGroup

KV_NAMESPACE = "sliceserve"

UNAVAILABLE_ERRORS = (RayError, DeploymentUnavailableError, RequestCancelledError)
"""What a handle call raises when its replica is gone, going, or not there yet."""

OVERLOADED_ERRORS = (BackPressureError,)
"""What a handle call raises when Serve itself has queued too much."""


def by_reference(handle: DeploymentHandle[Any], method: str) -> Any:
    """A handle to `method` that never takes Serve's gRPC path, which leaks object references and refuses 4 MiB."""
    return handle.options(method_name=method, _by_reference=True)


async def reference(response: DeploymentResponse[Any]) -> ray.ObjectRef[Any]:
    """The object that the result of a call by reference is. The caller owns it."""
    ref: ray.ObjectRef[Any] = await response._to_object_ref()
    return ref


async def choose(handle: DeploymentHandle[Any], hint: object) -> str:
    """The id of the replica that the deployment's request router chooses, without asking it. Waits until there is one.

    Args:
        hint: what the router may look at; stays in this process.
    """
    async with handle.choose_replica(hint, _reserve=False) as selection:
        return selection.replica_id


def begin_call_of_its_own() -> None:
    """Tells apart the calls that the current task makes from others of the same HTTP request.

    Serve's router finds a waiting call by its HTTP request. Of several that wait at a time it would serve one, and look
    for replicas for the others without pause and without end.
    """
    serve_context._set_request_context(_internal_request_id=uuid.uuid4().hex)


async def broadcast(handle: DeploymentHandle[Any], method: str, *args: object) -> list[Awaitable[Any]]:
    """Calls a method of every replica that is up. The answers come one by one: Serve's own wait is all or nothing."""
    results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    return [result.get_async() for result in results]  # type: ignore[no-untyped-call]


def replica_rank() -> int:
    """This replica's number in its deployment, from 0: the same after a restart, unlike its id."""
    return int(serve.get_replica_context().rank.rank)


def late_bound_ingress(cls: type) -> type:
    """Makes `cls` a Serve ingress whose ASGI app comes from its method `__serve_build_asgi_app__`, in the replica."""
    decorate: Callable[[type], type] = serve.ingress(None)
    return decorate(cls)


def node_ip() -> str:
    """This node's address as other nodes of the cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def kv_put(key: str, value: bytes) -> None:
    """Writes to the cluster's key-value store: no actor needed, readable before any replica runs."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=KV_NAMESPACE)


def kv_get(key: str) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE)
    return value


def kv_keys(prefix: str) -> list[str]:
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)]


def kv_delete(key: str) -> None:
    internal_kv._internal_kv_del(key, namespace=KV_NAMESPACE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the cluster that is alive."""

    id: str
    ip: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


def nodes() -> list[Node]:
    return [
        Node(id=node["NodeID"], ip=node["NodeManagerAddress"], labels=node["Labels"], resources=node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def placement_group(
    bundles: list[dict[str, float]], *, strategy: str, labels: list[dict[str, str]] | None = None
) -> Any:
    """Asks for a placement group that ends with this process; `labels` are what each bundle's node must have."""
    return ray.util.placement_group(bundles, strategy=strategy, bundle_label_selector=labels)


def tpu_slice(
    topology: str, version: str, resources: dict[str, float], *, chips_per_host: int, timeout_s: float
) -> SlicePlacementGroup:
    """Reserves the head of a free TPU slice and asks for a placement group on its hosts; both end with this process.

    Raises:
        TimeoutError, RuntimeError, ValueError: no slice is free, or Ray knows no such slice.
    """
    return SlicePlacementGroup(
        topology=topology,
        accelerator_version=version,
        resources_per_bundle=resources,
        chips_per_vm=chips_per_host,
        head_reservation_timeout_s=timeout_s,
    )


def wait_for_group(group: Any, timeout_s: float) -> bool:
    return bool(group.wait(timeout_s))


def nodes_of_group(group: Any) -> list[str]:
    """The id of each bundle's node."""
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [table[bundle] for bundle in range(len(table))]


def remove_group(group: Any) -> None:
    ray.util.remove_placement_group(group)


def init_private(temp_dir: str, **options: Any) -> None:
    """Starts a Ray of our own that ignores any other on this machine, with its files under `temp_dir`."""
    ray.init(address="local", _temp_dir=temp_dir, include_dashboard=options.pop("include_dashboard", False), **options)


def begin_to_delete(application: str) -> None:
    """Asks Serve to delete an application, and does not wait until it has."""
    serve.delete(application, _blocking=False)


def end_proxies() -> None:
    """Ends what takes HTTP requests for Serve on all nodes."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(SERVE_PROXY_NAME):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))


def deploy(app: serve.Application, *, name: str, route_prefix: str = "/") -> None:
    """Submits an application and returns without waiting for its replicas."""
    serve.run_many(
        [serve.RunTarget(target=app, name=name, route_prefix=route_prefix)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
