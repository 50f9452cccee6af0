"""The command line of `sliceserve serve`: Hex-LLM's flags, checked before anything heavy is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from backends import check_hardware
from cluster.cli.flags import FlagError, FlagParser, add_config_flags, given
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.environment import Environment

DEFAULT_PORT = 7080
"""Hex-LLM's."""


def serve(argv: Sequence[str]) -> int:
    """Starts a server as the flags say and stays until it is stopped. Returns the exit code."""
    parser = _parser()
    try:
        flags = parser.parse(argv)
        config = EngineConfig.from_args(given(flags))
        log_level = Environment.read().log_level
        port = port_number("port", flags.port)
        dashboard_port = None if flags.dashboard_port is None else port_number("dashboard_port", flags.dashboard_port)
        check_hardware(config)
    except (FlagError, ConfigError, BackendError) as error:
        print(f"sliceserve serve: {error}", file=sys.stderr)
        return 2
    from cluster.cli.serve import run

    return run(
        config,
        host=flags.host,
        port=port,
        haproxy=flags.haproxy,
        dashboard_port=dashboard_port,
        log_level=log_level,
    )


def port_number(flag: str, text: str) -> int:
    """Reads a TCP port.

    Raises:
        FlagError: it is not a number from 1 to 65535.
    """
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise FlagError(f"--{flag}={text}: use a port number from 1 to 65535")
    return int(text)


def _parser() -> FlagParser:
    parser = FlagParser(
        "sliceserve serve", "Start a server on this machine. Options are explained in docs/configuration.md."
    )
    network = parser.add_argument_group("Network")
    network.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="text",
        help="Address to listen on; 0.0.0.0 is every one. (default: %(default)s)",
    )
    network.add_argument(
        "--port", default=str(DEFAULT_PORT), metavar="int", help="Port of the API. (default: %(default)s)"
    )
    network.add_argument(
        "--haproxy",
        action="store_true",
        help="Let HAProxy instead of Serve's Python proxy take connections: faster, but it listens on every address.",
    )
    network.add_argument(
        "--dashboard_port",
        metavar="int",
        help="Also start Ray's dashboard, on this port; start-up says where its token is.",
    )
    add_config_flags(parser)
    return parser
