"""Calls to every replica of a deployment: those that hang or are dead neither delay nor hide the others' answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster import ray_compat

logger = logging.getLogger(__name__)

BROADCAST_TIMEOUT_S = 5.0
"""Longest wait for the answers of all replicas; less than a scrape of Prometheus waits."""


async def broadcast(
    deployment: DeploymentHandle[Any],
    method: str,
    *args: object,
    enough: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Calls a method of every replica; gives the answers of those that do answer in time, maybe none.

    Args:
        enough: an answer that makes the others unnecessary.
    """
    calls: list[asyncio.Future[Any]] = []
    answers: list[Any] = []
    try:
        with contextlib.suppress(TimeoutError, *ray_compat.UNAVAILABLE_ERRORS):
            async with asyncio.timeout(BROADCAST_TIMEOUT_S):
                calls = [asyncio.ensure_future(call) for call in await ray_compat.broadcast(deployment, method, *args)]
                for call in asyncio.as_completed(calls):
                    with contextlib.suppress(*ray_compat.UNAVAILABLE_ERRORS):
                        answers.append(await call)
                        if enough(answers[-1]):
                            return answers
    finally:
        for running in calls:
            running.cancel()
    if len(answers) < len(calls):
        silent = len(calls) - len(answers)
        logger.warning("%s: %d of %d replicas do not answer %s", deployment.deployment_name, silent, len(calls), method)
    return answers
