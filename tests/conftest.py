"""Options of the test suite, and one private Ray for the whole session, started by the first test that needs it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_environment import SERVE_FLAGS, set_environment
from tests import options

RAY_FOLDER = Path(tempfile.mkdtemp(prefix="sliceserve-test-"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensor-parallel-size", type=int, default=1, help="devices of the JAX engines that tests start, simulated"
    )
    parser.addoption("--matrix", action="store_true", help="all cases of tests of which a few run by default")
    parser.addoption(
        "--serve-defaults", action="store_true", help="Ray Serve as `serve run` and KubeRay have it, not as we start it"
    )


def pytest_configure(config: pytest.Config) -> None:
    set_environment(RAY_FOLDER, haproxy=False)  # before any test module imports Ray
    if config.getoption("--serve-defaults"):
        for name in SERVE_FLAGS:
            del os.environ[name]
    options.tensor_parallel_size = config.getoption("--tensor-parallel-size")
    config.addinivalue_line("markers", "matrix: one of many cases, which run with --matrix only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--matrix"):
        return
    left_out = [item for item in items if item.get_closest_marker("matrix")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("matrix")]


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
