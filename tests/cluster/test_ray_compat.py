"""The contract with Ray: every unstable API that we use is there and does what we need; an upgrade must pass it."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress

import ray
import ray._private.accelerators.tpu as ray_tpu
import ray.serve._private.constants as serve_constants
from ray import serve
from ray.serve import context as serve_context
from ray.serve import handle
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.util.tpu import SlicePlacementGroup

from cluster import ray_compat, ray_environment
from cluster.app import TPU_CHIPS
from cluster.messages import Ticket
from cluster.router import EngineRouter
from cluster.sockets import LineAddress

ADDRESS = LineAddress(host="127.0.0.1", port=1, secret="")


class Late:
    """An ingress whose application is made in the replica."""

    def __serve_build_asgi_app__(self) -> object:
        raise NotImplementedError

    async def size(self, data: bytes) -> int:
        return len(data)


def test_the_ray_that_is_tested_is_the_ray_that_is_pinned() -> None:
    assert ray.__version__.startswith("2.60.")


def test_every_flag_of_our_environment_is_read_by_serve() -> None:
    flags = {*ray_environment.SERVE_FLAGS, *ray_environment.HAPROXY_PORT_FLAGS, *ray_environment.HAPROXY_PATH_FLAGS}
    source = inspect.getsource(serve_constants)
    assert not [flag for flag in flags | {ray_environment.HAPROXY_FLAG} if f'"{flag}"' not in source]


def test_an_ingress_can_get_its_application_late() -> None:
    deployment = serve.deployment(ray_compat.late_bound_ingress(Late))
    assert deployment.bind() is not None


def test_broadcast_and_cancellation_are_parts_of_handles() -> None:
    assert callable(handle.DeploymentHandle.broadcast)
    assert "return_exceptions" in inspect.signature(handle.DeploymentBroadcastResponse.results_async).parameters
    assert callable(handle.DeploymentResponse.cancel)
    assert inspect.iscoroutinefunction(handle.DeploymentResponse._to_object_ref)


def test_ray_gives_a_process_as_many_tpu_chips_as_we_think() -> None:
    assert ray_tpu.TPU_VALID_CHIP_OPTIONS == TPU_CHIPS


def test_slices_and_labelled_groups_take_what_we_give_them() -> None:
    asked = {"topology", "accelerator_version", "resources_per_bundle", "chips_per_vm", "head_reservation_timeout_s"}
    assert asked <= inspect.signature(SlicePlacementGroup).parameters.keys()
    assert callable(SlicePlacementGroup.shutdown)
    assert isinstance(SlicePlacementGroup.placement_group, property)
    assert "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters


def test_nodes_and_groups_say_where_they_are(serve_url: str) -> None:
    assert serve_url
    [node] = ray_compat.nodes()
    assert ipaddress.ip_address(node.ip)
    group = ray_compat.placement_group([{"CPU": 0.1}] * 2, strategy="SPREAD")
    assert ray_compat.wait_for_group(group, 30)
    assert ray_compat.nodes_of_group(group) == [node.id, node.id]
    ray_compat.remove_group(group)


async def test_calls_of_one_http_request_can_be_told_apart() -> None:
    serve_context._set_request_context(request_id="http", _internal_request_id="one")

    async def call() -> tuple[str, str]:
        ray_compat.begin_call_of_its_own()
        metadata = get_request_metadata(InitHandleOptions(), DynamicHandleOptions())
        return metadata.request_id, metadata.internal_request_id

    tasks = [asyncio.create_task(call()) for _ in range(2)]
    (first, own), (second, other) = [await task for task in tasks]
    assert first == second == "http"
    assert len({own, other, "one"}) == 3


def test_the_key_value_store_keeps_lists_and_forgets(serve_url: str) -> None:
    assert serve_url
    ray_compat.kv_put("contract/a", b"1")
    ray_compat.kv_put("contract/a", b"2")
    ray_compat.kv_put("contract/b", b"3")
    assert ray_compat.kv_get("contract/a") == b"2"
    assert sorted(ray_compat.kv_keys("contract/")) == ["contract/a", "contract/b"]
    ray_compat.kv_delete("contract/a")
    assert ray_compat.kv_get("contract/a") is None
    ray_compat.kv_delete("contract/b")


def test_this_node_has_an_address_that_others_reach(serve_url: str) -> None:
    assert serve_url
    assert ipaddress.ip_address(ray_compat.node_ip())


def test_calls_by_reference_are_not_limited_go_where_was_chosen_and_replicas_answer_one_by_one(serve_url: str) -> None:
    assert serve_url
    options = {"ray_actor_options": {"num_cpus": 0.1}, "request_router_config": {"request_router_class": EngineRouter}}
    app = serve.deployment(Size, name="Size", num_replicas=2, **options).bind()
    ray_compat.deploy(app, name="contract", route_prefix="/contract")

    async def call() -> tuple[int, list[int], list[tuple[str, str]]]:
        async with asyncio.timeout(60):
            while serve.status().applications["contract"].status != "RUNNING":
                await asyncio.sleep(0.1)
            deployed = serve.get_deployment_handle("Size", "contract")
            size: int = await ray_compat.by_reference(deployed, "size").remote(bytes(8 << 20))
            answers = await ray_compat.broadcast(deployed, "rank")
            calls = ray_compat.by_reference(deployed, "name")
            routed = []
            for _ in range(6):
                chosen = await ray_compat.choose(calls, "a question")
                ticket = Ticket(request_id="r", stream=1, address=ADDRESS, replica=chosen)
                routed.append((chosen, await calls.remote(ticket)))
            return size, sorted([await answer for answer in answers]), routed

    try:
        size, ranks, routed = asyncio.run(call())
        assert size == 8 << 20  # Serve's gRPC path takes 4 MiB
        assert ranks == [0, 1]
        assert all(chosen == reached for chosen, reached in routed)
    finally:
        serve.delete("contract")


class Size:
    async def size(self, data: bytes) -> int:
        return len(data)

    async def rank(self) -> int:
        return ray_compat.replica_rank()

    async def name(self, _: Ticket) -> str:
        name: str = serve.get_replica_context().replica_id.unique_id
        return name
