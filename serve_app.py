"""What Ray Serve imports: `serve run serve_app:app [key=value …]`, `serve deploy`, and KubeRay's RayService.

`app` takes the options of EngineConfig (docs/configuration.md) as arguments.
"""

from __future__ import annotations

from typing import Any

import click
from ray import serve

from cluster.app import build_app
from engine.config import ConfigError


def app(args: dict[str, Any]) -> serve.Application:
    """Builds the application.

    Raises:
        click.ClickException: an option is wrong. `serve run` is a click program and shows it as one line.
    """
    try:
        return build_app(args)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
