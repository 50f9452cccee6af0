"""Where gangs are placed: on fake TPU slices and Neuron hosts of a real Ray cluster, as nodes say what they are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster import ray_compat
from cluster.gang import placement
from cluster.gang.placement import _slice_seats
from engine.backend import BackendError


@pytest.mark.matrix
def test_gangs_get_whole_slices_in_the_order_of_the_hosts_own_numbers() -> None:
    command = [sys.executable, "-m", "tests.cluster.gang.fake_cluster"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])

    slices = [{seat["slice"] for seat in seats} for seats in found["slices"]]
    assert sorted(map(tuple, slices)) == [("slice-0",), ("slice-1",)]
    for seats in [*found["slices"], found["again"]]:
        assert [seat["rank"] for seat in seats] == [0, 1, 2, 3]
        assert [seat["worker"] for seat in seats] == ["0", "1", "2", "3"]
        assert [seat["environment"]["TPU_WORKER_ID"] for seat in seats] == ["0", "1", "2", "3"]
        assert all(seat["environment"]["TPU_WORKER_HOSTNAMES"].count(",") == 3 for seat in seats)
    assert {seat["slice"] for seat in found["again"]} == slices[0]  # the one that was given back
    assert found["no third slice"].startswith("no TPU slice v6e:4x4 with 4 hosts was free within 1 s")
    assert found["other size"].endswith("tensor_parallel_size=32: it has v6e:4x4")
    assert found["wrong topology"].startswith("topology=v6e:2x4 has 8 devices, which tensor_parallel_size=16")
    assert len({seat["node"] for seat in found["neuron"]}) == 2
    assert {seat["instance"] for seat in found["neuron"]} == {"trn1.32xlarge"}
    assert found["too many neuron hosts"].startswith("the cluster had no place for 3 hosts with 32 neuron_cores")
    assert not any("\n" in value for value in found.values() if isinstance(value, str))


def node(ip: str, worker_id: str | None) -> ray_compat.Node:
    labels = {placement.SLICE_NAME: "slice-7"} | ({} if worker_id is None else {placement.WORKER_ID: worker_id})
    return ray_compat.Node(id=ip, ip=ip, labels=labels, resources={})


def test_ranks_follow_the_hosts_numbers_and_not_the_bundles() -> None:
    seats = _slice_seats([node("10.0.0.3", "1"), node("10.0.0.1", "2"), node("10.0.0.2", "0")])
    assert [(seat.rank, seat.bundle, seat.node_ip) for seat in seats] == [
        (0, 2, "10.0.0.2"),
        (1, 0, "10.0.0.3"),
        (2, 1, "10.0.0.1"),
    ]
    assert {seat.environment["TPU_WORKER_HOSTNAMES"] for seat in seats} == {"10.0.0.2,10.0.0.3,10.0.0.1"}


@pytest.mark.parametrize(
    ("worker_ids", "reason"),
    [
        (("0", "0"), "nodes 10.0.0.0 and 10.0.0.1 of TPU slice slice-7 both have TPU_WORKER_ID=0; give each host"),
        (("0", "2"), r"the hosts of a TPU slice are numbered \[0, 2\], not 0 to 1"),
        (("0", None), "node 10.0.0.1 of a TPU slice has no TPU_WORKER_ID"),
    ],
)
def test_hosts_without_numbers_of_their_own_are_refused(worker_ids: tuple[str | None, ...], reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        _slice_seats([node(f"10.0.0.{index}", worker_id) for index, worker_id in enumerate(worker_ids)])
