"""What `serve status` says in each state of an application, which is also what KubeRay shows."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from cluster import ray_compat
from cluster.app import build_app
from tests.backends.models import tiny_llama
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


@pytest.mark.matrix
def test_health_says_why_no_engine_starts_also_where_none_needs_to_run(serve_url: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    options = {"backend": "cpu", "model": str(model), "tokenizer": "smollm2", "min_replicas": 0, "max_replicas": 1}
    ray_compat.deploy(build_app(options), name="damaged", route_prefix="/damaged")
    try:
        seen: list[httpx.Response] = []

        def is_down() -> bool:
            seen.append(httpx.get(f"{serve_url}/damaged/health", timeout=60))
            return seen[-1].status_code == 503 and "no engine can start" in seen[-1].text

        eventually(is_down, 60)
        assert weights.name in seen[-1].json()["error"]["message"]
        assert int(seen[-1].headers["retry-after"]) > 0
    finally:
        serve.delete("damaged")
