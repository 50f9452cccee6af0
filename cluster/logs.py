"""Our packages' log records go where the replica's own go: Serve's log file and, if Serve's do, stderr."""

from __future__ import annotations

import logging

SERVE_LOGGER = "ray.serve"
PACKAGES = ("engine", "backends", "cluster")


class _ToServe(logging.Handler):
    """Hands records to Serve's logger, whatever handlers it has by then: Serve replaces them on reconfiguration."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(SERVE_LOGGER).handle(record)


def configure_logging(level: str) -> None:
    """Sends what our packages log at `level` or above to Serve's log. Called in each replica; again does no harm."""
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.handlers = [_ToServe()]
