"""Which server `chat` and `bench` talk to: --url, or --port for one on this machine."""

from __future__ import annotations

import argparse

DEFAULT_PORT = 7080


def add_server_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--url", help=f"base URL (default: http://127.0.0.1:{DEFAULT_PORT})")
    parser.add_argument("--port", type=int, help="a server on this machine, instead of --url")


def server_url(flags: argparse.Namespace) -> str:
    """The base URL that the flags name, with a scheme and without /v1 at its end."""
    url = flags.url or f"127.0.0.1:{flags.port or DEFAULT_PORT}"
    if "://" not in url:
        url = f"http://{url}"
    return str(url).rstrip("/").removesuffix("/v1")
