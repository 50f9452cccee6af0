"""LineKeeper: has every engine open a line to this ingress before the first request to it, so that its news come."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster import ray_compat
from cluster.balancer import Balancer
from cluster.broadcast import broadcast
from cluster.mailbox import Mailbox
from cluster.sockets import LineAddress
from engine.errors import first_line

logger = logging.getLogger(__name__)

LINES_INTERVAL_S = 2.0
"""How soon an engine that has come since is asked for a line."""


class LineKeeper:
    """Starts with `start`, on the event loop of its mailbox. A request to an engine without a line opens one, too."""

    def __init__(self, mailbox: Mailbox, engine: DeploymentHandle[Any], balancer: Balancer) -> None:
        """`balancer` knows which replicas there are."""
        self._mailbox = mailbox
        self._engine = engine
        self._balancer = balancer
        self._listening = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Asks all engines now, and those that come later soon. May be called more than once."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def address(self) -> LineAddress:
        """Where the mailbox listens, from the first call on."""
        if self._mailbox.address is not None:
            return self._mailbox.address
        async with self._listening:
            return self._mailbox.address or await self._mailbox.start(ray_compat.node_ip())

    async def _keep(self) -> None:
        while True:
            try:
                address = await self.address()
                if not self._mailbox.replicas or self._balancer.replicas - self._mailbox.replicas:
                    await broadcast(self._engine, "open_line", address)
            except Exception as error:  # requests open lines, too
                logger.warning("engines can't be asked for lines now: %s", first_line(error))
            await asyncio.sleep(LINES_INTERVAL_S)
