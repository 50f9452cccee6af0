"""`sliceserve serve`: a server on this machine, from nothing to "ready", and back to nothing at Ctrl-C."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from backends import check_model
from cluster.ray_environment import DASHBOARD_HOST, Dashboard, port_problem, set_environment
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.text.files import check_text_files


def run(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    haproxy: bool = False,
    dashboard_port: int | None = None,
    log_level: str = "INFO",
    output: TextIO = sys.stderr,
) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit code: 0 after a stop that was asked for, 1 if it can't serve.

    Call it in a process that has not imported Ray.

    Args:
        haproxy: HTTP goes through HAProxy (faster, but on every interface) instead of Serve's Python proxy.
        dashboard_port: also start Ray's dashboard there.
        log_level: of the replicas' logs.
    """
    problem = port_problem(host, port)
    if problem is None and dashboard_port is not None:
        problem = port_problem(DASHBOARD_HOST, dashboard_port, flag="dashboard_port")
    if problem is not None:
        print(f"error: {problem}", file=output)
        return 1
    for note in config.notes():
        print(f"note: {note}", file=output)
    print(f"starting {config.model_name} …", file=output, flush=True)
    try:
        check_model(config)
        check_text_files(config)
    except (BackendError, ConfigError) as error:
        print(f"error: {error}", file=output)
        return 1
    print("starting Ray …", file=output, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="sliceserve-"))
    try:
        set_environment(folder, haproxy=haproxy)
        dashboard = None if dashboard_port is None else Dashboard.at(dashboard_port, folder)
        # Ray reads its environment when it is imported.
        from cluster.app import build_app
        from cluster.cli.local_server import serve_until_stopped

        return serve_until_stopped(
            build_app(config, log_level=log_level),
            host=host,
            port=port,
            dashboard=dashboard,
            folder=folder,
            output=output,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
