"""A Ray cluster of several nodes here, whose pools are on different ones: KV goes from object store to object store.

A program, so that it is a Ray of its own: `python -m tests.cluster.kv_transfer.several_nodes 1` (hosts per replica)
prints one JSON object as the last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster.ray_environment import set_environment

NAME = "nodes"
TOKEN_BYTES = 16384
OPTIONS: dict[str, object] = {
    "backend": "mock",
    "mock_prefill_ms_per_token": 0.05,
    "mock_kv_bytes_per_token": TOKEN_BYTES,
    "max_decode_seqs": 16,
    "max_num_batched_tokens": 256,
    "disagg_topo": "1,1",
    "disagg_min_prefill_tokens": 100,
    "kv_transfer_object_mib": 1,
    "kv_transfer_checksums": True,
}


def node_of(nodes: Sequence[Any], pid: int) -> int:
    """Which node runs a process."""
    for index, node in enumerate(nodes):
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        if any(child.pid == pid for child in raylet.children(recursive=True)):
            return index
    raise AssertionError(f"no node runs process {pid}")


def worker_nodes(nodes: Sequence[Any], url: str, role: str, hosts: int) -> list[int]:
    """The node of each process that has devices."""
    import ray

    from tests.cluster.apps import metric, replica_processes

    if hosts == 1:
        [replica] = replica_processes(NAME, "Prefill" if role == "prefill" else "Engine")
        return [node_of(nodes, replica.pid)]
    [name] = metric(url, "vllm:num_requests_running", role=role)
    actors = [ray.get_actor(f"sliceserve:{NAME}:{name}:worker:{rank}", namespace="serve") for rank in range(hosts)]
    return [node_of(nodes, found.pid) for found in ray.get([a.describe.remote() for a in actors], timeout=10)]


def serve_and_ask(nodes: Sequence[Any], url: str, hosts: int) -> dict[str, Any]:
    from tests.cluster.kv_transfer.load import Load, total
    from tests.cluster.kv_transfer.test_pools import expected, text

    where = {role: worker_nodes(nodes, url, role, hosts) for role in ("prefill", "decode")}
    longest = list(range(300, 2300))  # 32 MiB
    answer = text(url, prompt=longest, max_tokens=10, temperature=0)
    num_bytes = total(url, "sliceserve_kv_transfer_bytes_total", role="decode")
    load = Load(url, expected, seed=2)
    load.run(40, threads=4)
    return {
        "nodes": where,
        "longest is right": answer == expected(longest, 10),
        "bytes of the longest": num_bytes,
        "wrong": load.wrong,
        "transfers": total(url, "sliceserve_kv_transfers_total", role="decode"),
        "failures": total(url, "sliceserve_kv_transfer_failures_total"),
    }


def main() -> None:
    hosts = int(sys.argv[1])
    set_environment(Path(tempfile.mkdtemp()), haproxy=False)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.config import HTTPOptions

    from cluster import ray_compat
    from cluster.app import build_app
    from tests.cluster.apps import START_TIMEOUT_S, eventually
    from tests.conftest import free_port

    try:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=256 << 20) for _ in range(1 + hosts)]
        cluster.wait_for_nodes(60)
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        app = build_app({**OPTIONS, "num_hosts": hosts, "tensor_parallel_size": hosts})
        ray_compat.deploy(app, name=NAME, route_prefix=f"/{NAME}")
        eventually(lambda: serve.status().applications[NAME].status == "RUNNING", START_TIMEOUT_S)
        print(json.dumps(serve_and_ask(nodes, f"http://127.0.0.1:{port}/{NAME}", hosts)), flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        for process in psutil.Process().children(recursive=True):  # quicker than to end each node
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(0)


if __name__ == "__main__":
    main()
