"""A Ray cluster of several nodes on this machine, of which a part is lost; a program, so that it is a Ray of its own.

`python -m tests.chaos.small_cluster node` takes away a node with an engine replica. `… gcs` kills and restarts the
Global Control Store, which keeps its state in the Redis that environment variable RAY_REDIS_ADDRESS names. Both print
one JSON object as the last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.ray_environment import set_environment

RECOVERY_TIMEOUT_S = 120.0


async def lose_node(cluster: Any, nodes: list[Any], url: str) -> dict[str, Any]:
    from tests.chaos.faults import engines, eventually
    from tests.chaos.streams import problems, traffic

    async with traffic(url, streams=8, max_tokens=300) as running:
        await asyncio.sleep(2)
        victim = next(node for node in nodes if _hosts(node, "Engine") and not _hosts(node, "Ingress"))
        started = time.monotonic()
        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        await eventually(lambda: len(engines("nodes")) == 2, RECOVERY_TIMEOUT_S)
        replaced_s = time.monotonic() - started
        answers = await running.stop()
    return {
        "problems": problems(answers),
        "streams": len(answers),
        "longest_gap_s": max(answer.longest_gap_s for answer in answers),
        "replaced_s": replaced_s,
    }


async def restart_gcs(cluster: Any, _: list[Any], url: str) -> dict[str, Any]:
    from tests.chaos.faults import engines, eventually
    from tests.chaos.streams import Asked, http_client, problems, stream, traffic

    head = cluster.head_node
    async with traffic(url, streams=8, max_tokens=300) as running:
        await asyncio.sleep(2)
        head.kill_gcs_server(check_alive=False)
        await asyncio.sleep(5)
        async with http_client() as client:
            meanwhile = await stream(client, url, Asked(prompt=(1000, 1001), max_tokens=20))
        await asyncio.to_thread(head.start_gcs_server)
        await asyncio.sleep(10)
        started = time.monotonic()
        engines("nodes")[0].kill()
        await eventually(lambda: len(engines("nodes")) == 2, RECOVERY_TIMEOUT_S)
        replaced_s = time.monotonic() - started
        answers = await running.stop()
    return {
        "problems": problems([*answers, meanwhile]),
        "streams": len(answers),
        "longest_gap_s": max(answer.longest_gap_s for answer in answers),
        "replaced_s": replaced_s,
    }


def _hosts(node: Any, deployment: str) -> bool:
    """Whether a replica of the deployment runs under this node's raylet."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    title = f"ray::ServeReplica:nodes:{deployment}"
    return any(title in " ".join(child.cmdline()) for child in raylet.children(recursive=True))


def main() -> None:
    action: Callable[..., Any] = {"node": lose_node, "gcs": restart_gcs}[sys.argv[1]]
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
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes(60)
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        app = build_app({"backend": "mock", "mock_step_ms": 10, "data_parallel_size": 2})
        ray_compat.deploy(app, name="nodes", route_prefix="/nodes")
        eventually(lambda: serve.status().applications["nodes"].status == "RUNNING", START_TIMEOUT_S)
        print(json.dumps(asyncio.run(action(cluster, nodes, f"http://127.0.0.1:{port}/nodes"))), flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        for process in psutil.Process().children(recursive=True):  # a cluster that has lost parts takes minutes to end
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os._exit(0)


if __name__ == "__main__":
    main()
