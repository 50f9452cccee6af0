"""What `serve status` says in each state of an application, which is also what KubeRay shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from cluster import ray_compat
from cluster.app import build_app
from tests.cluster.apps import completion, deployed, eventually, replica_processes

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


def test_a_replica_that_died_is_replaced_and_the_application_runs_again(serve_url: str) -> None:
    with deployed(serve_url, "replaced") as url:
        assert {name: dict(d.replica_states) for name, d in status("replaced").deployments.items()} == {
            "Engine": {"RUNNING": 1},
            "Ingress": {"RUNNING": 1},
        }
        [engine] = replica_processes("replaced", "Engine")
        engine.kill()
        eventually(lambda: [p.pid for p in replica_processes("replaced", "Engine")] not in ([], [engine.pid]))
        eventually(lambda: status("replaced").status == "RUNNING", timeout_s=60)  # UNHEALTHY until then
        assert status("replaced").deployments["Engine"].status == "HEALTHY"
        assert completion(url).status_code == 200
