"""Our packages' log records go where the replica's own go: Serve's log file of the replica, and stderr if Serve does."""

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


def first_line(error: BaseException) -> str:
    """An error for a log or a user, in one line; its type when it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
