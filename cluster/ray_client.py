"""RayEngineClient: the EngineClient of the ingress replicas, over Serve handles and a Mailbox.

One Serve call per request stays open until the request ends; it carries the request there, and cancellation and failure
back and forth. What the engine yields arrives in the mailbox. Both ends are watched: whichever says first that the
request is over ends it, and an engine that dies or goes silent gives an error, never a wait without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster import ray_compat
from cluster.client import EngineUnavailableError, Health
from cluster.mailbox import Inbox, Mailbox, MailboxAddress
from cluster.messages import Refusal, RefusalKind
from cluster.metrics_text import render
from engine.backend import BackendInfo
from engine.errors import first_line
from engine.request import EngineRequest, FinishReason, RequestOutput

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
"""Longest wait for a call that an engine server answers from memory, until some replica is there to take it."""
BROADCAST_TIMEOUT_S = 5.0
"""Longest wait for the answers of all replicas; less than a scrape of Prometheus waits."""
ADMISSION_TIMEOUT_S = 10.0
"""Longest wait for an engine to take a request: it says so at once, with an output that holds nothing."""
LAST_FRAME_TIMEOUT_S = 10.0
"""Longest wait for the last tokens once the engine server said that the request has ended."""

NO_ENGINE = "no engine answers; it may be starting or restarting"
QUEUE_FULL = Refusal(kind=RefusalKind.OVERLOADED, message="too many requests are waiting; try again later")
ENGINE_GONE = Refusal(kind=RefusalKind.UNAVAILABLE, message="the engine that served this request is gone; try again")
LAST_FRAME_LOST = Refusal(kind=RefusalKind.UNAVAILABLE, message="the engine's last tokens did not arrive; try again")


class RayEngineClient:
    """Talks to all replicas of one engine deployment. Use it from one event loop."""

    def __init__(self, engine: DeploymentHandle[Any], ingress: DeploymentHandle[Any]) -> None:
        """`ingress` is the deployment that this client works for; its replicas are asked for their metrics too."""
        self._engine = engine
        self._ingress = ingress
        self._admit = ray_compat.by_reference(engine, "admit")
        self._mailbox = Mailbox()
        self._mailbox_lock = asyncio.Lock()
        self._info: BackendInfo | None = None
        self._calls: set[asyncio.Task[Refusal | None]] = set()

    async def info(self) -> BackendInfo:
        if self._info is None:
            self._info = await self._ask("info")
        return self._info

    async def health(self) -> Health:
        """The worst of all replicas that answer."""
        answers: list[Health] = await _broadcast(self._engine, "health")
        if not answers:
            return Health(healthy=False, reason=NO_ENGINE)
        return next((answer for answer in answers if not answer.healthy), answers[0])

    async def metrics_text(self) -> bytes:
        engines, ingresses = await asyncio.gather(
            _broadcast(self._engine, "report"), _broadcast(self._ingress, "report")
        )
        return render(engines, ingresses)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        address = self._mailbox.address or await self._listen()
        stream, inbox = self._mailbox.open(request.request_id)
        call = asyncio.create_task(self._hold(request, stream, address))
        self._calls.add(call)
        call.add_done_callback(lambda _: inbox.wake())
        call.add_done_callback(self._calls.discard)
        ended = False
        try:
            async for output in self._outputs(inbox, call):
                ended = output.finish_reason is not None
                yield output
        finally:
            self._mailbox.discard(stream)
            if not ended:
                call.cancel()

    def close(self) -> None:
        """No request is open any more: stops listening."""
        self._mailbox.close()

    async def _outputs(self, inbox: Inbox, call: asyncio.Task[Refusal | None]) -> AsyncGenerator[RequestOutput, None]:
        started = False
        await self._admission(inbox, call)
        while True:
            await self._arrival(inbox, call)
            output = inbox.take()
            if output is not None and _says_nothing(output):
                continue
            if output is None:
                refusal = call.result() or LAST_FRAME_LOST
                if not started:
                    raise refusal.as_error()
                yield RequestOutput(
                    request_id=inbox.request_id, finish_reason=FinishReason.ERROR, error=refusal.message
                )
                return
            started = True
            yield output
            if output.finish_reason is not None:
                return

    async def _admission(self, inbox: Inbox, call: asyncio.Task[Refusal | None]) -> None:
        """Waits for the engine's word that it has the request. Without a replica, Serve would wait for one for ever."""
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_S):
                if not call.done():
                    await inbox.wait()
        except TimeoutError:
            raise EngineUnavailableError(NO_ENGINE) from None

    async def _arrival(self, inbox: Inbox, call: asyncio.Task[Refusal | None]) -> None:
        """Returns when there is something in the inbox, or nothing will come any more."""
        if not call.done():
            await inbox.wait()
        if call.done() and call.result() is None:  # ended well: the last frame may still be on its way
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_FRAME_TIMEOUT_S):
                    await inbox.wait()

    async def _hold(self, request: EngineRequest, stream: int, address: MailboxAddress) -> Refusal | None:
        """The Serve call of one request, until it ends. Cancelling it aborts the request in the engine."""
        try:
            response = self._admit.remote(request, stream, address)
            try:
                refusal: Refusal | None = await response
                return refusal
            except asyncio.CancelledError:
                response.cancel()
                raise
        except ray_compat.OVERLOADED_ERRORS:
            return QUEUE_FULL
        except ray_compat.UNAVAILABLE_ERRORS as error:
            logger.warning("request %s: the engine did not finish it: %s", request.request_id, first_line(error))
            return ENGINE_GONE

    async def _listen(self) -> MailboxAddress:
        async with self._mailbox_lock:
            return self._mailbox.address or await self._mailbox.start(ray_compat.node_ip())

    async def _ask(self, method: str) -> Any:
        """Calls a method of any replica that is up."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return await ray_compat.by_reference(self._engine, method).remote()
        except (TimeoutError, *ray_compat.OVERLOADED_ERRORS, *ray_compat.UNAVAILABLE_ERRORS) as error:
            raise EngineUnavailableError(NO_ENGINE) from error


async def _broadcast(deployment: DeploymentHandle[Any], method: str) -> list[Any]:
    """Calls a method of every replica; gives the answers of those that do answer in time, maybe none."""
    calls: list[asyncio.Future[Any]] = []
    with contextlib.suppress(TimeoutError, *ray_compat.UNAVAILABLE_ERRORS):
        async with asyncio.timeout(BROADCAST_TIMEOUT_S):
            calls = [asyncio.ensure_future(call) for call in await ray_compat.broadcast(deployment, method)]
    if not calls:
        return []
    try:
        await asyncio.wait(calls, timeout=BROADCAST_TIMEOUT_S)
        good = [call.result() for call in calls if call.done() and call.exception() is None]
    finally:
        for call in calls:
            call.cancel()
    if len(good) < len(calls):
        silent = len(calls) - len(good)
        logger.warning("%s: %d of %d replicas do not answer %s", deployment.deployment_name, silent, len(calls), method)
    return good


def _says_nothing(output: RequestOutput) -> bool:
    return not output.token_ids and output.finish_reason is None and output.prompt_logprobs is None
