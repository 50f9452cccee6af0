"""The environment of a Ray of our own. Ray has no other way to set these, and reads them when it is imported.

So this module imports no Ray, and whoever starts one calls `set_environment` before the first import of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVE_FLAGS: Mapping[str, str] = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""A Serve that spends less on each request (handles then need a running event loop, which replicas have); that has
patience with a machine that is busy loading a model: with Serve's own 5 s its proxy is killed before it is up; that
notices a dead proxy within 3 s, not 30; and that does not wait for a hung engine to drain, whose requests have gone
elsewhere by then."""

HAPROXY_FLAG = "RAY_SERVE_ENABLE_HA_PROXY"

HAPROXY_PORT_FLAGS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""Ports that are fixed unless set, so that two HAProxies on one machine clash."""

HAPROXY_PATH_FLAGS: Mapping[str, str] = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "haproxy.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "haproxy-state",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "haproxy-state/server-state",
}
"""Files that all HAProxies of a machine share unless set."""

DASHBOARD_HOST = "127.0.0.1"

INHERITED = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "RAY_NAMESPACE", "RAY_TMPDIR")
"""What points to another Ray and must not lead ours astray."""


def set_environment(folder: Path, *, haproxy: bool) -> None:
    """Prepares this process for a private Ray with its files in `folder`, protected by a token of its own."""
    for name in INHERITED:
        os.environ.pop(name, None)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    # Else whatever asks something of a Ray that has just been stopped would start another one.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.update(SERVE_FLAGS)
    if haproxy:
        os.environ[HAPROXY_FLAG] = "1"
        os.environ.update({name: str(folder / file) for name, file in HAPROXY_PATH_FLAGS.items()})
        ports = _free_ports(len(HAPROXY_PORT_FLAGS))
        os.environ.update({name: str(port) for name, port in zip(HAPROXY_PORT_FLAGS, ports, strict=True)})
    else:
        os.environ.pop(HAPROXY_FLAG, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """Where Ray's dashboard is to listen, and the file with the token that it asks people for."""

    port: int
    token_file: Path

    @classmethod
    def at(cls, port: int, folder: Path) -> Dashboard:
        """Writes the token of the environment, for this user only."""
        file = folder / "token"
        file.touch(mode=0o600)
        file.write_text(os.environ["RAY_AUTH_TOKEN"] + "\n", encoding="utf-8")
        return cls(port=port, token_file=file)


def port_problem(host: str, port: int, *, flag: str = "port") -> str | None:
    """Why a server can't listen there, in one line; None when it can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"can't listen on {host} port {port}: {reason}; choose another with --{flag}"
    return None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
