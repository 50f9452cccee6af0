"""ApplicationState: health and metrics of a whole application, from what all of its replicas say of themselves."""

from __future__ import annotations

import asyncio
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.broadcast import Answers, broadcast
from cluster.client import Health
from cluster.exchange import NO_ENGINE
from cluster.metrics_text import render
from cluster.progress import last_failure
from engine.errors import first_line

logger = logging.getLogger(__name__)

ASLEEP = "no engine runs while there is nothing to do; the next request starts one"
NO_PREFILL = "no prefill replica answers; decode replicas compute all prompts themselves"
CAN_NOT_START = "no engine can start: "
CONTROL_STORE_TIMEOUT_S = 1.0


class ApplicationState:
    def __init__(
        self,
        engine: DeploymentHandle[Any],
        ingress: DeploymentHandle[Any],
        prefill: DeploymentHandle[Any] | None = None,
        *,
        sleeps: bool = False,
    ) -> None:
        """
        Args:
            prefill: the deployment that computes prompts for the engine's replicas.
            sleeps: whether it is as it should be that no engine runs.
        """
        self._engine = engine
        self._ingress = ingress
        self._prefill = prefill
        self._sleeps = sleeps
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="start-up-failures")
        self._reading: asyncio.Future[str | None] | None = None

    async def health(self) -> Health:
        """Healthy while any replica is: the others' requests go there."""
        asked = [self._engine, *([] if self._prefill is None else [self._prefill])]
        engines, *others = await asyncio.gather(*(_ask_health(one) for one in asked))
        health = _best(engines)
        if health is None:
            return await self._health_without(engines.num_asked)
        prefills = [_best(answers) for answers in others]
        if not health.healthy or all(one is not None and one.healthy for one in prefills):
            return health
        return Health(healthy=True, degraded=True, reason=NO_PREFILL)

    async def _health_without(self, num_silent: int) -> Health:
        """When no engine answers, of so many that Serve knows of."""
        failure = await self._last_failure()
        if failure is not None:
            return Health(healthy=False, reason=CAN_NOT_START + failure)
        if self._sleeps and not num_silent:
            return Health(healthy=True, degraded=True, reason=ASLEEP)
        return Health(healthy=False, reason=NO_ENGINE)

    async def _last_failure(self) -> str | None:
        """Why no engine starts, if that is known. One question at a time: Ray's control store may be away."""
        if self._reading is None or self._reading.done():
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(self._reader, last_failure, self._engine.app_name)
        try:
            return await asyncio.wait_for(asyncio.shield(self._reading), CONTROL_STORE_TIMEOUT_S)
        except Exception as error:  # health is answered without it
            logger.debug("start-up records can't be read: %s", first_line(error))
            return None

    async def metrics_text(self) -> bytes:
        """The metrics of all replicas that answer, in Prometheus text format."""
        deployments = [self._engine, self._ingress, *([] if self._prefill is None else [self._prefill])]
        answers = await asyncio.gather(*(broadcast(one, "report") for one in deployments))
        engines, ingresses, *prefills = [each.given for each in answers]
        return render([*engines, *itertools.chain(*prefills)], ingresses)


async def _ask_health(deployment: DeploymentHandle[Any]) -> Answers:
    return await broadcast(deployment, "health", enough=lambda answer: answer.healthy)


def _best(answers: Answers) -> Health | None:
    """That of a deployment's best replica; None if none answers."""
    given: list[Health] = answers.given
    return next((answer for answer in given if answer.healthy), given[0] if given else None)
