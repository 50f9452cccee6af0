"""One private Ray for the whole test session, started by the first test that needs it."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_environment import set_environment

RAY_FOLDER = Path(tempfile.mkdtemp(prefix="sliceserve-test-"))
set_environment(RAY_FOLDER, haproxy=False)  # before any test module imports Ray


def pytest_sessionfinish() -> None:
    shutil.rmtree(RAY_FOLDER, ignore_errors=True)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """Where the session's Ray Serve takes HTTP requests; `tests.cluster.apps.deployed` puts applications there."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    from cluster.local_ray import LocalRay

    port = free_port()
    ray = LocalRay(RAY_FOLDER)
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.stop()
