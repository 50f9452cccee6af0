"""RayEngineClient: the EngineClient of the ingress replicas, over Serve handles and a Mailbox.

A request goes to its engine over the line that the engine has opened, or with its Serve call if there is none yet. The
Serve call stays open until the request ends; it holds the request's place in Serve's counts, and carries cancellation
and failure back and forth. What the engine yields arrives in the mailbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster import ray_compat
from cluster.application_state import ApplicationState
from cluster.balancer import Balancer, Route
from cluster.client import EngineUnavailableError, Health
from cluster.continuation import Continuation, ResumptionCounts
from cluster.exchange import ENGINE_GONE, NO_ENGINE, NOT_TAKEN, Exchange, InterruptedExchangeError
from cluster.line_keeper import LineKeeper
from cluster.mailbox import Mailbox
from cluster.messages import Refusal, RefusalKind, Ticket
from cluster.suspects import Suspects
from cluster.waker import Waker
from engine.backend import BackendInfo
from engine.errors import first_line
from engine.request import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
"""Longest wait for a call that an engine server answers from memory, until some replica is there to take it."""

QUEUE_FULL = Refusal(kind=RefusalKind.OVERLOADED, message="too many requests are waiting; try again later")


class RayEngineClient:
    """Talks to all replicas of one engine deployment. Use it from one event loop."""

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        ingress: DeploymentHandle[Any],
        balancer: Balancer,
        *,
        resume_timeout_s: float,
        prefill: DeploymentHandle[Any] | None = None,
        wake_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            ingress: the deployment that this client works for; its replicas are asked for their metrics too.
            balancer: chooses engine replicas; this client tells it what it hears of them.
            resume_timeout_s: how long a request that lost its engine waits for another one.
            prefill: the deployment that computes prompts for the engine's replicas.
            wake_timeout_s: where all engines may have been stopped, how long a request waits for one to start.
        """
        self._wake_timeout_s = wake_timeout_s
        self._waker = None if wake_timeout_s is None else Waker(self._wake)
        self._state = ApplicationState(engine, ingress, prefill, sleeps=wake_timeout_s is not None)
        self._engine = engine
        self._admit = ray_compat.by_reference(engine, "admit")
        self._balancer = balancer
        self._mailbox = Mailbox(balancer)
        self._lines = LineKeeper(self._mailbox, engine, balancer)
        self._info: BackendInfo | None = None
        self._calls: set[asyncio.Task[Refusal | None]] = set()
        self._routes: dict[Exchange, Route] = {}
        self._suspects = Suspects(lambda replica: self._mailbox.line(replica) is not None)
        self._resume_timeout_s = resume_timeout_s
        self.resumptions = ResumptionCounts()

    async def info(self) -> BackendInfo:
        if self._info is None:
            self._info = await self._ask("info")
        self._lines.start()
        return self._info

    async def health(self) -> Health:
        return await self._state.health()

    async def metrics_text(self) -> bytes:
        return await self._state.metrics_text()

    async def generate(
        self, request: EngineRequest, *, session: str = ""
    ) -> AsyncGenerator[RequestOutput, bool | None]:
        way = Continuation(
            request,
            resume_timeout_s=self._resume_timeout_s,
            counts=self.resumptions,
            wake_timeout_s=self._wake_timeout_s,
        )
        while True:
            exchange = await self._begin(way, session)
            route = self._routes[exchange]
            try:
                while True:
                    output = way.passed(await exchange.next())
                    if output.token_ids:
                        self._balancer.prefilled(route)
                    if (yield output):
                        exchange.finish()
                        return
                    if output.finish_reason is not None:
                        return
            except InterruptedExchangeError as interruption:
                delay = self._interrupted(way, exchange.replica, interruption.refusal)
            finally:
                self._close(exchange)
            await asyncio.sleep(delay)

    def close(self) -> None:
        """No request is open any more: stops listening."""
        self._lines.close()
        if self._waker is not None:
            self._waker.close()
        self._mailbox.close()

    async def _begin(self, way: Continuation, session: str) -> Exchange:
        """Finds an engine that takes the request.

        Raises:
            EngineOverloadedError, EngineUnavailableError, InvalidRequestError: there is none.
        """
        full: list[str] = []
        while True:
            suspects = [*self._suspects, *full] if full else self._suspects
            route = self._balancer.begin(way.next_request(), session=session, suspects=suspects)
            try:
                replica = await self._choose(way, route)
                last_resort = replica in self._suspects
                exchange = await self._send(route.request, replica)
            except BaseException:
                self._balancer.end(route)
                raise
            self._routes[exchange] = route
            try:
                await exchange.wait_until_taken(way.attempt_deadline)
            except InterruptedExchangeError as interruption:
                self._close(exchange)
                refusal = interruption.refusal
                if refusal.kind is RefusalKind.OVERLOADED and not full and len(self._balancer.replicas) > 1:
                    full.append(replica)  # another one may have room; with two full ones, so is the rest
                    continue
                delay = self._interrupted(way, replica, refusal, last_resort=last_resort)
            except BaseException:
                self._close(exchange)
                raise
            else:
                way.taken()
                self._suspects.clear(replica)
                return exchange
            await asyncio.sleep(delay)

    def _interrupted(self, way: Continuation, replica: str, refusal: Refusal, *, last_resort: bool = False) -> float:
        """Seconds until the next try; raises when there is to be none."""
        if refusal.kind in (RefusalKind.UNAVAILABLE, RefusalKind.MOVED):
            self._suspects.add(replica)
            logger.warning("request %s, replica %s: %s", way.request_id, replica, refusal.message)
        return way.interrupted(refusal, last_resort=last_resort)

    async def _send(self, request: EngineRequest, replica: str) -> Exchange:
        """Gives a request to a replica: over the line, if there is one, else with the Serve call."""
        address = await self._lines.address()
        stream, inbox = self._mailbox.open(request.request_id)
        line = self._mailbox.line(replica)
        if line is not None:
            line.send(stream, request)
        ticket = Ticket(request_id=request.request_id, stream=stream, address=address, replica=replica)
        call = asyncio.create_task(self._hold(ticket, request if line is None else None))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return Exchange(self._mailbox, replica, stream, inbox, line, call)

    def _close(self, exchange: Exchange) -> None:
        exchange.close()
        self._balancer.end(self._routes.pop(exchange))

    async def _choose(self, way: Continuation, route: Route) -> str:
        """The replica to try. Waits until there is one."""
        while True:
            try:
                async with asyncio.timeout_at(way.deadline):
                    search = ray_compat.choose(self._admit, route)
                    return await (search if self._waker is None else self._waker.patiently(search))
            except ray_compat.OVERLOADED_ERRORS:
                delay = way.interrupted(QUEUE_FULL)
            except (TimeoutError, *ray_compat.UNAVAILABLE_ERRORS):
                raise way.give_up(NOT_TAKEN) from None
            await asyncio.sleep(delay)

    async def _hold(self, ticket: Ticket, request: EngineRequest | None) -> Refusal | None:
        """The Serve call of one request, until it ends. Cancelling it aborts the request in the engine."""
        ray_compat.begin_call_of_its_own()  # this task is
        try:
            response = self._admit.remote(ticket, request)
            try:
                refusal: Refusal | None = await response
                return refusal
            except asyncio.CancelledError:
                response.cancel()
                raise
        except ray_compat.OVERLOADED_ERRORS:
            return QUEUE_FULL
        except ray_compat.UNAVAILABLE_ERRORS as error:
            logger.warning("request %s: the engine did not finish it: %s", ticket.request_id, first_line(error))
            return ENGINE_GONE

    async def _wake(self) -> None:
        ray_compat.begin_call_of_its_own()  # else Serve cancels it with the request that happened to make it
        await self._ask("info")

    async def _ask(self, method: str) -> Any:
        """Calls a method of any replica that is up."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S if self._wake_timeout_s is None else self._wake_timeout_s):
                return await ray_compat.by_reference(self._engine, method).remote()
        except (TimeoutError, *ray_compat.OVERLOADED_ERRORS, *ray_compat.UNAVAILABLE_ERRORS) as error:
            raise EngineUnavailableError(NO_ENGINE) from error
