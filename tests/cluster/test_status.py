"""What `serve status` says in each state of an application, which is also what KubeRay shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from cluster import ray_compat
from cluster.app import build_app
from tests.cluster.apps import eventually

pytestmark = pytest.mark.usefixtures("serve_url")


def status(name: str) -> ApplicationStatusOverview:
    return serve.status().applications[name]


def test_a_deployment_that_can_not_start_ends_with_one_line_that_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    ray_compat.deploy(build_app({"backend": "cpu", "model": str(missing)}), name="nomodel", route_prefix="/nomodel")
    try:
        assert status("nomodel").status == "DEPLOYING"
        eventually(lambda: {d.status for d in status("nomodel").deployments.values()} == {"DEPLOY_FAILED"}, 60)
        failed = status("nomodel")
        assert failed.status == "DEPLOY_FAILED"
        assert set(failed.deployments) == {"Engine", "Ingress"}
        for deployment in failed.deployments.values():
            *_, last = deployment.message.strip().splitlines()
            assert last.startswith("cluster.progress.StartUpError: no model at ")
            assert str(missing) in last
            assert "model_files.py" not in deployment.message  # the way to the error is for the log
    finally:
        serve.delete("nomodel")
