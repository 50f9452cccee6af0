"""Pools on different nodes (`make test-disagg`): KV is pulled from one node's object store into another's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.kv_transfer.several_nodes import TOKEN_BYTES


@pytest.mark.matrix
@pytest.mark.parametrize("hosts", [1, 2])
def test_pools_on_different_nodes_answer_as_one_engine_does(hosts: int) -> None:
    command = [sys.executable, "-m", "tests.cluster.kv_transfer.several_nodes", str(hosts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip(), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Mock hosts keep the same one head, which the first prefill host gives to all decode hosts.
    assert set(found["nodes"]["decode"]) - {found["nodes"]["prefill"][0]}, "nothing crosses nodes"
    assert found["longest is right"]
    assert found["bytes of the longest"] == 2000 * TOKEN_BYTES
    assert found["wrong"] == []
    assert found["transfers"] > 10
    assert found["failures"] == 0
