"""Calls to every replica of a deployment: those that hang or are dead neither delay nor hide the others' answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster import ray_compat

logger = logging.getLogger(__name__)

BROADCAST_TIMEOUT_S = 5.0
"""Longest wait for the answers of all replicas; less than a scrape of Prometheus waits."""


@dataclass(slots=True)
class Answers:
    num_asked: int = 0  # replicas
    given: list[Any] = field(default_factory=list)  # by those that did in time


async def broadcast(
    deployment: DeploymentHandle[Any],
    method: str,
    *args: object,
    enough: Callable[[Any], bool] = lambda _: False,
) -> Answers:
    """Calls a method of every replica.

    Args:
        enough: an answer that makes the others unnecessary.
    """
    calls: list[asyncio.Future[Any]] = []
    answers = Answers()
    try:
        with contextlib.suppress(TimeoutError, *ray_compat.UNAVAILABLE_ERRORS):
            async with asyncio.timeout(BROADCAST_TIMEOUT_S):
                calls = [asyncio.ensure_future(call) for call in await ray_compat.broadcast(deployment, method, *args)]
                answers.num_asked = len(calls)
                for call in asyncio.as_completed(calls):
                    with contextlib.suppress(*ray_compat.UNAVAILABLE_ERRORS):
                        answers.given.append(await call)
                        if enough(answers.given[-1]):
                            return answers
    finally:
        for running in calls:
            running.cancel()
    if silent := answers.num_asked - len(answers.given):
        named = (deployment.deployment_name, silent, answers.num_asked, method)
        logger.warning("%s: %d of %d replicas do not answer %s", *named)
    return answers
