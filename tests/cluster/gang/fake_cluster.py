"""A Ray cluster of fake nodes on this machine, and gangs placed on it; a program, so that it is a Ray of its own.

Prints one JSON object: what tests/cluster/gang/test_placement.py looks at.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.ray_environment import set_environment

SLICES, HOSTS = 2, 4


def labels(slice_number: int, worker_id: int) -> dict[str, str]:
    return {
        "ray.io/accelerator-type": "TPU-V6E",
        "ray.io/tpu-slice-name": f"slice-{slice_number}",
        "ray.io/tpu-worker-id": str(worker_id),
        "ray.io/tpu-topology": "4x4",
        "ray.io/tpu-pod-type": "v6e-16",
    }


@contextlib.contextmanager
def fake_cluster(*, neuron_nodes: int) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        for slice_number in range(SLICES):
            for worker_id in range(HOSTS):
                head = {"TPU-v6e-16-head": 1} if worker_id == 0 else {}
                resources = {"TPU": 4, f"slice-{slice_number}": 1, **head}
                cluster.add_node(
                    num_cpus=1,
                    resources=resources,
                    labels=labels(slice_number, worker_id),
                    env_vars={"TPU_NAME": f"slice-{slice_number}", "TPU_WORKER_ID": str(worker_id)},
                    wait=False,
                )
        for _ in range(neuron_nodes):
            neuron = {"ray.io/accelerator-type": "aws-neuron-core", "node.kubernetes.io/instance-type": "trn1.32xlarge"}
            cluster.add_node(num_cpus=1, resources={"neuron_cores": 32}, labels=neuron, wait=False)
        cluster.wait_for_nodes(60)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    set_environment(Path(tempfile.mkdtemp()), haproxy=False)
    import ray

    from cluster.gang.placement import Reservation, reserve
    from engine.backend import BackendError, no_progress
    from engine.config import EngineConfig

    def seats(reservation: Reservation) -> list[dict[str, Any]]:
        nodes = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
        return [
            {
                "rank": seat.rank,
                "slice": nodes[seat.node_id].get("ray.io/tpu-slice-name"),
                "worker": nodes[seat.node_id].get("ray.io/tpu-worker-id"),
                "instance": nodes[seat.node_id].get("node.kubernetes.io/instance-type"),
                "node": seat.node_id,
                "environment": dict(seat.environment),
            }
            for seat in reservation.seats
        ]

    def refusal(timeout_s: float, kind: str, **options: Any) -> str:
        config = EngineConfig.from_args({"num_hosts": HOSTS, "tensor_parallel_size": 16, **options})
        try:
            reserve(config, kind, no_progress, timeout_s)
        except BackendError as error:
            return str(error)
        return "none"

    found: dict[str, Any] = {}
    with fake_cluster(neuron_nodes=2):
        tpu = EngineConfig.from_args({"backend": "tpu", "num_hosts": HOSTS, "tensor_parallel_size": 16})
        first = reserve(tpu, "tpu", no_progress, 30)
        second = reserve(tpu, "tpu", no_progress, 30)
        found["slices"] = [seats(first), seats(second)]
        found["no third slice"] = refusal(1, "tpu")
        found["other size"] = refusal(1, "tpu", tensor_parallel_size=32)
        found["wrong topology"] = refusal(1, "tpu", topology="v6e:2x4")
        first.release()
        third = reserve(tpu, "tpu", no_progress, 30)
        found["again"] = seats(third)
        for reservation in (second, third):
            reservation.release()
        neuron = EngineConfig.from_args({"num_hosts": 2, "tensor_parallel_size": 64, "topology": "trn1.32xlarge"})
        placed = reserve(neuron, "neuron", no_progress, 30)
        found["neuron"] = seats(placed)
        found["too many neuron hosts"] = refusal(1, "neuron", num_hosts=3, tensor_parallel_size=96)
        placed.release()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
