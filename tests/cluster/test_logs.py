"""Log levels from the environment: read at the door, carried to the replicas, and applied to our packages' loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import click
import pytest

import serve_app
from cluster.app import build_app
from cluster.cli.serve_flags import serve
from cluster.logs import PACKAGES, SERVE_LOGGER, configure_logging
from engine.environment import Environment

LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
VARIABLES = [
    ({"SLICESERVE_LOG_LEVEL": "warning"}, "WARNING"),
    ({"HEX_LLM_LOG_LEVEL": "ERROR"}, "ERROR"),
    ({"HEX_LLM_VERBOSE_LOG": "1"}, "DEBUG"),
    ({}, "INFO"),
]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What Serve's log gets."""
    got: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            got.append(record)

    keep, serve_logger = Keep(), logging.getLogger(SERVE_LOGGER)
    ours = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger, logger.level, logger.propagate, logger.handlers) for logger in ours]
    serve_logger.addHandler(keep)
    yield got
    serve_logger.removeHandler(keep)
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def deployments(app: Any) -> dict[str, Any]:
    """An application's deployments and what they are bound with, by name."""
    ingress = app._bound_deployment
    engine = ingress.init_args[1]._bound_deployment
    return {"Ingress": ingress, "Engine": engine}


@pytest.mark.parametrize(("variables", "level"), VARIABLES)
def test_each_variable_reaches_both_deployments(
    variables: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLICESERVE_LOG_LEVEL", "HEX_LLM_LOG_LEVEL", "HEX_LLM_VERBOSE_LOG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Environment.read().log_level == level
    for deployment in deployments(serve_app.app({"backend": "mock"})).values():
        assert level in deployment.init_args
        assert deployment.logging_config["log_level"] == level
        assert deployment.logging_config["enable_access_log"] is False


def test_a_wrong_level_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLICESERVE_LOG_LEVEL", "loud")
    with pytest.raises(click.ClickException, match="SLICESERVE_LOG_LEVEL=LOUD: use DEBUG"):
        serve_app.app({"backend": "mock"})
    assert serve(["--backend=mock"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "sliceserve serve: SLICESERVE_LOG_LEVEL=LOUD: use DEBUG, INFO, WARNING, ERROR or CRITICAL"
    ]


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR"])
def test_our_packages_write_to_the_replicas_log_at_that_level(level: str, records: list[logging.LogRecord]) -> None:
    configure_logging(level)
    configure_logging(level)
    for package in PACKAGES:
        logger = logging.getLogger(f"{package}.some.module")
        for number in LEVELS:
            logger.log(number, "said by %s", package)
    expected = [number for number in LEVELS if number >= getattr(logging, level)]
    assert [record.levelno for record in records] == expected * len(PACKAGES)


def test_the_level_of_an_application_is_info_unless_told() -> None:
    assert deployments(build_app({"backend": "mock"}))["Engine"].logging_config["log_level"] == "INFO"
