"""PrefillPool: the prefill replicas as a decode replica sees them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ray.exceptions import ObjectLostError
from ray.serve.handle import DeploymentHandle

from cluster import ray_compat
from cluster.balancer import Balancer, Route
from cluster.gang.kv import KVHost, KVSlice
from cluster.gang.ray_kv import GivenPayload
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.messages import Refusal, RefusalKind
from cluster.suspects import Suspects
from engine.errors import first_line
from engine.kv_blocks import KVLateError, KVPayload
from engine.request import EngineRequest

ACCEPT_TIMEOUT_S = 3.0
"""Longest wait for a replica to take a call. Serve would keep one whose replica has died until there is another."""
CLOSE_TIMEOUT_S = 5.0


class PrefillError(RuntimeError):
    """KV does not come. `reason` is one of cluster.kv_transfer.metrics.FAILURES, the message one line."""

    def __init__(self, reason: str, message: str, *, nobody_is_left: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.nobody_is_left = nobody_is_left  # to ask, for a while


_REASONS = {
    RefusalKind.OVERLOADED: "overloaded",
    RefusalKind.INVALID: "refused",
    RefusalKind.UNAVAILABLE: "unavailable",
    RefusalKind.MOVED: "unavailable",
}


class PrefillPool(ABC):
    """Methods raise PrefillError. How long a replica may take over a call that it has accepted is the caller's."""

    @abstractmethod
    async def choose(self, request: EngineRequest, transfer: str) -> str:
        """The replica that should compute this prompt. Its transfer has to be closed."""

    @abstractmethod
    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        """Has the prompt computed."""

    @abstractmethod
    async def fetch(
        self, ticket: TransferTicket, index: int, num_received: int, *, described: bool
    ) -> tuple[KVChunk | NoChunk, object]:
        """A chunk of its KV, once it is computed, and the host to ask if it is `described`; acknowledges the first
        ones."""

    @abstractmethod
    def suspect(self, replica: str) -> bool:
        """This replica has just failed: for a while it is chosen only if there is no other. Whether there is none."""

    @abstractmethod
    def close(self, ticket: TransferTicket) -> None:
        """Nothing more is needed of this transfer, finished or not. Does not wait, and never fails."""


class ServePrefillPool(PrefillPool):
    """Over a Serve handle. Create and use it in one event loop."""

    def __init__(self, prefill: DeploymentHandle[Any], balancer: Balancer) -> None:
        self._prefill = ray_compat.by_reference(prefill, "prefill")
        self._fetch = ray_compat.by_reference(prefill, "fetch_kv")
        self._give = ray_compat.by_reference(prefill, "give_kv")
        self._close = ray_compat.by_reference(prefill, "close_transfer")
        self._balancer = balancer
        self._routes: dict[str, Route] = {}  # by transfer
        self._suspects = Suspects(lambda _: True)
        self._closing: set[asyncio.Task[None]] = set()

    async def choose(self, request: EngineRequest, transfer: str) -> str:
        ray_compat.begin_call_of_its_own()
        route = self._balancer.begin(request, suspects=self._suspects)
        try:
            replica = await ray_compat.choose(self._prefill, route)
            self._routes[transfer] = route
            return replica
        except ray_compat.OVERLOADED_ERRORS as error:
            raise PrefillError("overloaded", "too many prompts wait for a prefill replica") from error
        except ray_compat.UNAVAILABLE_ERRORS as error:
            raise PrefillError("unavailable", "there is no prefill replica") from error
        finally:
            if transfer not in self._routes:
                self._balancer.end(route)

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        answer: PrefillAnswer = await _call(self._prefill, ticket, order)
        if ticket.transfer in self._routes:
            self._balancer.prefilled(self._routes[ticket.transfer])
        return answer

    async def fetch(
        self, ticket: TransferTicket, index: int, num_received: int, *, described: bool
    ) -> tuple[KVChunk | NoChunk, object]:
        chunk: KVChunk | NoChunk = await _call(self._fetch, ticket, index, num_received, described)
        return chunk, _ReplicaHost(self._give, ticket, asyncio.get_running_loop())

    def suspect(self, replica: str) -> bool:
        self._suspects.add(replica)
        return all(name in self._suspects for name in self._balancer.replicas)

    def close(self, ticket: TransferTicket) -> None:
        route = self._routes.pop(ticket.transfer, None)
        if route is not None:
            self._balancer.end(route)
        task = asyncio.create_task(self._closed(ticket))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, ticket: TransferTicket) -> None:
        """Frees what the prefill replica holds. If this fails, its lease does."""
        with contextlib.suppress(PrefillError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await _call(self._close, ticket)


class _ReplicaHost(KVHost):
    """A prefill replica on one host, to be asked for a described chunk."""

    def __init__(self, give: Any, ticket: TransferTicket, loop: asyncio.AbstractEventLoop) -> None:
        self._give = give
        self._ticket = ticket
        self._loop = loop

    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:  # noqa: ARG002
        """For a thread other than the loop's. The replica's own options say whether there is a checksum.

        Raises:
            PrefillError, KVLateError: the replica does not take the call.
        """
        asked = asyncio.run_coroutine_threadsafe(self._ask(slices[0].key, heads), self._loop)
        try:
            return GivenPayload(asked.result(2 * ACCEPT_TIMEOUT_S))
        except TimeoutError:
            asked.cancel()
            raise KVLateError("the prefill replica took no call for KV") from None
        finally:
            del asked  # an error that it holds, and that holds this, would keep KV in a cycle

    async def _ask(self, index: int, heads: range) -> Any:
        ray_compat.begin_call_of_its_own()
        try:
            response = self._give.remote(self._ticket, index, heads)
            accepted = asyncio.ensure_future(ray_compat.reference(response))
            try:
                return await _in_time(accepted)
            except BaseException:
                _give_up(response, accepted)
                raise
        except _CALL_ERRORS as error:
            raise _prefill_error(error) from error


async def _call(handle: Any, *args: object) -> Any:
    """Calls the replica that the ticket names.

    The current task makes no other call at the same time; cancelling it cancels the call.
    """
    ray_compat.begin_call_of_its_own()
    try:
        response = handle.remote(*args)
        accepted = asyncio.ensure_future(ray_compat.reference(response))
        try:
            result = await (await _in_time(accepted))
        except BaseException:
            _give_up(response, accepted)
            raise
    except _CALL_ERRORS as error:
        raise _prefill_error(error) from error
    if isinstance(result, Refusal):
        raise PrefillError(_REASONS[result.kind], result.message)
    return result


_CALL_ERRORS = (*ray_compat.OVERLOADED_ERRORS, *ray_compat.UNAVAILABLE_ERRORS)


def _prefill_error(error: Exception) -> PrefillError:
    """What it means that a call has failed."""
    if isinstance(error, ray_compat.OVERLOADED_ERRORS):
        return PrefillError("overloaded", "the prefill replica has too many calls")
    if isinstance(error, ObjectLostError):
        return PrefillError("lost", f"an object with KV is lost: {first_line(error)}")
    return PrefillError("unavailable", f"the prefill replica is gone: {first_line(error)}")


async def _in_time(accepted: asyncio.Future[Any]) -> Any:
    """The object that the result will be, once a replica has taken the call."""
    try:
        async with asyncio.timeout(ACCEPT_TIMEOUT_S):
            return await asyncio.shield(accepted)
    except TimeoutError:
        raise PrefillError("unavailable", f"the prefill replica took no call for {ACCEPT_TIMEOUT_S:g} s") from None


def _give_up(response: Any, accepted: asyncio.Future[Any]) -> None:
    """Cancels a call; if no replica has taken it yet, when one has. Of a call that is cancelled before, Serve keeps
    everything in a reference cycle, with an object full of KV if it was taken nevertheless."""

    def cancel(_: object = None) -> None:
        timer.cancel()
        failed = accepted.done() and (accepted.cancelled() or accepted.exception() is not None)
        if not failed:
            response.cancel()

    timer = asyncio.get_running_loop().call_later(ACCEPT_TIMEOUT_S, cancel)
    if accepted.done():
        cancel()
    else:
        accepted.add_done_callback(cancel)
