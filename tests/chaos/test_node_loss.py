"""Parts of a cluster are lost: a node with all that runs on it, and Ray's own control store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port

ROOT = Path(__file__).parent.parent.parent
PROGRAM_TIMEOUT_S = 240.0


def run(action: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.small_cluster", action],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    found = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    assert found is not None, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found)
    print(action, {name: value for name, value in result.items() if name != "problems"})
    return result


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server here, without which Ray does not survive the end of its control store")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        time.sleep(1)
        yield f"127.0.0.1:{port}"
        server.terminate()


def test_streams_of_a_node_that_is_lost_go_on_elsewhere() -> None:
    result = run("node")
    assert result["problems"] == []
    assert result["longest_gap_s"] < 15


@pytest.mark.matrix
def test_serving_goes_on_while_the_control_store_is_away_and_is_repaired_afterwards(redis: str) -> None:
    result = run("gcs", RAY_REDIS_ADDRESS=redis)
    assert result["problems"] == []
