"""What Ray Serve imports: `serve run serve_app:app [key=value …]`, `serve deploy`, and KubeRay's RayService.

`app` takes the options of EngineConfig (docs/configuration.md) as arguments.
"""

from __future__ import annotations

import logging
from typing import Any

import click
import ray
from ray import serve

from backends import check_model
from cluster.app import build_app
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.environment import Environment
from engine.text.files import check_text_files

logger = logging.getLogger("ray.serve")  # `serve run` shows it


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application.

    Raises:
        click.ClickException: an option or a variable of the environment is wrong, or the model. `serve run` is a click
            program and shows it as one line.
    """
    try:
        config = EngineConfig.from_args(args)
        for note in config.notes():
            logger.warning("%s", note)
        if not ray.is_initialized():  # `serve run`, and not a node of the cluster that may not hold the model
            check_model(config)
            check_text_files(config)
        return build_app(config, log_level=Environment.read().log_level)
    except (ConfigError, BackendError) as error:
        raise click.ClickException(str(error)) from None
