"""What `serve run serve_app:app key=value`, `serve deploy` and KubeRay import, and what they get for wrong options."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import yaml
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build_as_serve_does
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

import serve_app
from backends import check_hardware, check_model
from cluster.app import build_app
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.text.files import check_text_files

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.yaml"


def test_serve_builds_the_application_from_key_value_strings() -> None:
    options = {"model": "smollm2", "max_model_len": "4096", "backend": "mock", "num_ingress_replicas": "2"}
    assert isinstance(build_as_serve_does(serve_app.app, options), Application)


def test_replicas_that_share_a_tpu_host_reserve_their_chips() -> None:
    options = {"backend": "tpu", "data_parallel_size": 2, "tensor_parallel_size": 4}
    assert engine_resources(options) == {"TPU": 4.0}
    assert engine_resources({**options, "data_parallel_size": 1}) == {}
    assert engine_resources({**options, "backend": "cpu"}) == {}
    pools = {"backend": "tpu", "tensor_parallel_size": 4, "disagg_topo": "1,1"}
    assert engine_resources(pools) == {"TPU": 4.0}


@pytest.mark.parametrize("size", [3, 16])
def test_replicas_that_ray_could_not_place_on_a_tpu_host_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="1, 2, 4, 8 chips"):
        build_app({"backend": "tpu", "data_parallel_size": 2, "tensor_parallel_size": size})


def engine_resources(options: dict[str, object]) -> dict[str, float]:
    engine = build_app(options)._bound_deployment.init_args[1]
    resources: dict[str, float] = engine._bound_deployment.ray_actor_options.get("resources", {})
    return resources


def test_serve_builds_the_application_without_options() -> None:
    assert isinstance(build_as_serve_does(serve_app.app, {}), Application)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": "4096"}, "did you mean max_model_len?"),
        ({"max_model_len": "many"}, "max_model_len='many'"),
        ({"disagg_topo": "1"}, "give prefill and decode replicas as P,D"),
    ],
)
def test_a_wrong_option_is_one_line_that_serve_run_shows_without_traceback(options: dict[str, str], words: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        build_as_serve_does(serve_app.app, options)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"model": "smollm2", "max_model_len": "100000000"}, "max_model_len=100000000"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_before_anything_starts(options: dict[str, str], words: str) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        check_model(EngineConfig.from_args(options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template": "/no/such/template.jinja"}, "chat_template=/no/such/template.jinja can't be read"),
        ({"chat_template": "{here}"}, "can't be read: Is a directory"),
        ({"tokenizer": "/no/such/folder"}, "tokenizer=/no/such/folder: nothing is there"),
        ({"tokenizer": "{here}"}, "holds no tokenizer"),
        ({"tokenizer": "{model}"}, "holds no tokenizer"),
        ({"model": "{model}", "backend": "mock"}, "holds no tokenizer"),
    ],
)
def test_a_missing_tokenizer_or_chat_template_is_one_line_before_anything_starts(
    options: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = {"here": tmp_path / "empty", "model": tmp_path / "model"}
    with pytest.raises((BackendError, ConfigError), match=words) as caught:
        check_text_files(
            EngineConfig.from_args({"backend": "mock", **{k: v.format(**paths) for k, v in options.items()}})
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attention", ["pallas", "jax"])
def test_kernels_of_hardware_that_is_not_here_are_one_line_before_anything_starts(attention: str) -> None:
    with pytest.raises(BackendError, match=f"attention={attention} does not run on cpu; use auto, native, xla"):
        check_hardware(EngineConfig(backend="cpu", attention=attention))  # type: ignore[arg-type]


def test_what_is_there_passes_the_check(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for options in ({}, {"chat_template": str(template)}, {"tokenizer": str(tmp_path)}, {"tokenizer": "owner/name"}):
        check_text_files(EngineConfig.from_args({"backend": "mock", **options}))


def test_the_example_for_serve_deploy_is_valid_and_has_no_unknown_keys() -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    schema = ServeDeploySchema.model_validate(document)
    assert set(document) <= set(ServeDeploySchema.model_fields)
    for raw, application in zip(document["applications"], schema.applications, strict=True):
        assert set(raw) <= set(ServeApplicationSchema.model_fields)
        assert application.import_path == "serve_app:app"
        EngineConfig.from_args(application.args)
        for deployment in raw.get("deployments", []):
            assert set(deployment) <= set(DeploymentSchema.model_fields)
            assert deployment["name"] in ("Ingress", "Engine")
