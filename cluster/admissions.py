"""Admissions: the requests that an engine server has, from the moment they come to their end.

A request comes over the line from its ingress, and the Serve call that holds its place comes beside it; or the call
brings the request along, where there is no line yet. The two may arrive in either order and find each other here: the
request starts when it arrives, and the call stays open until it has ended. A refusal goes back over the line, as calls
may have to wait in Serve's router; a call that comes nevertheless hears it, too. A request whose call never comes is
ended after a while, as Serve does not know of it. All of this runs on Serve's event loop, except `emit`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from cluster import frames
from cluster.messages import Refusal
from cluster.outbox import Connection
from cluster.publisher import Publisher
from cluster.submission import submit
from engine.core import EngineCore
from engine.news import EngineNews
from engine.request import EngineRequest, FinishReason, RequestOutput

REQUEST_TIMEOUT_S = 10.0
"""Longest that a call waits for its request."""
CALL_TIMEOUT_S = 60.0
"""Longest that a request runs, or is remembered, without its call."""

NEVER_CAME = "the request did not reach the engine; try again"
NOT_HELD = f"Serve did not confirm the request within {CALL_TIMEOUT_S:g} s; try again"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Admission:
    """A request that the engine has, had, or refused."""

    request_id: str
    stream: int
    connection: Connection
    ended: asyncio.Future[Refusal | None]  # a refusal if the engine did not take it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Meeting:
    """Where a request that came over the line and its call find each other."""

    admission: asyncio.Future[Admission]
    deadline: asyncio.TimerHandle | None  # of the call, once the request is there


class Admissions:
    """One per engine server."""

    def __init__(self) -> None:
        self._engine: EngineCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # known from the first request on
        self._running: dict[str, Admission] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._num_calls: Counter[Admission] = Counter()  # that hold one
        self._lines: set[Connection] = set()
        self._publisher = Publisher()
        # What the engine has yielded and told, step by step, and is not posted yet:
        self._steps: deque[tuple[list[RequestOutput], EngineNews]] = deque()
        self._posting = False

    def attach(self, engine: EngineCore) -> None:
        """Requests go to this engine, whose outputs come to `emit`."""
        self._engine = engine

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, nor half of one."""
        return not self._running and not self._meetings and not self._num_calls

    # -- requests and calls

    def start(self, request: EngineRequest, stream: int, connection: Connection) -> Admission:
        """Gives a request to the engine. Its ingress hears at once whether it was taken."""
        self._loop = asyncio.get_running_loop()
        admission = Admission(
            request_id=request.request_id, stream=stream, connection=connection, ended=self._loop.create_future()
        )
        refusal = submit(self._engine, request)
        if refusal is None:
            self._running[request.request_id] = admission
            connection.post([(stream, RequestOutput(request_id=request.request_id))])
        else:
            admission.ended.set_result(refusal)
            connection.refuse(stream, refusal)
        return admission

    def arrived(self, connection: Connection, stream: int, request: EngineRequest) -> None:
        """A request came over the line."""
        loop = asyncio.get_running_loop()
        waiting = self._meetings.get(request.request_id)
        admission = self.start(request, stream, connection)
        if waiting is not None:
            if not waiting.admission.done():
                waiting.admission.set_result(admission)
            return
        here: asyncio.Future[Admission] = loop.create_future()
        here.set_result(admission)
        deadline = loop.call_later(CALL_TIMEOUT_S, self._call_missed, admission)
        self._meetings[request.request_id] = _Meeting(admission=here, deadline=deadline)

    async def called(self, request_id: str) -> Admission | None:
        """A call came for a request that travels over the line. None if the request doesn't come."""
        meeting = self._meetings.get(request_id)
        if meeting is None and request_id in self._running:  # Serve sent the call twice, not knowing of the first one
            return self._running[request_id]
        if meeting is None:
            future: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
            meeting = self._meetings[request_id] = _Meeting(admission=future, deadline=None)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await meeting.admission
        except TimeoutError:
            return None
        finally:
            if meeting.deadline is not None:
                meeting.deadline.cancel()
            self._meetings.pop(request_id, None)

    def brought(self, request: EngineRequest, stream: int, connection: Connection) -> Admission:
        """A call came with its request."""
        running = self._running.get(request.request_id)  # Serve sent the call twice
        return self.start(request, stream, connection) if running is None else running

    async def hold(self, admission: Admission) -> Refusal | None:
        """Returns when the request has ended. Cancelling this ends it, unless another call holds it, too."""
        self._num_calls[admission] += 1
        try:
            return await asyncio.shield(admission.ended)
        except asyncio.CancelledError:
            if self._num_calls[admission] == 1:
                self._abort(admission)
            raise
        finally:
            self._num_calls[admission] -= 1
            if not self._num_calls[admission]:
                del self._num_calls[admission]

    def withdrawn(self, connection: Connection, request_id: str, *, is_finished: bool = False) -> None:
        """An ingress waits for this request no longer, maybe as its reader has all that it wanted."""
        admission = self._running.get(request_id)
        if admission is not None and admission.connection is connection:
            self._abort(admission, FinishReason.STOP if is_finished else FinishReason.ABORT)
        self._forget_refused(connection, request_id)

    def opened(self, connection: Connection) -> None:
        """An ingress listens, and doesn't know what the engine has cached."""
        self._lines.add(connection)
        self._publisher.tell_all(connection)

    def lost(self, connection: Connection) -> None:
        """Nobody reads what this connection's requests yield."""
        self._lines.discard(connection)
        for admission in [a for a in self._running.values() if a.connection is connection]:
            self._abort(admission)

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error."""
        for admission in list(self._running.values()):
            self._fail(admission, reason)

    # -- outputs

    def emit(self, outputs: list[RequestOutput]) -> None:
        """Takes a step's outputs from the engine's thread. Steps that the event loop did not get to leave as one."""
        assert self._loop is not None  # outputs come from requests only
        assert self._engine is not None
        self._steps.append((outputs, self._engine.news()))
        if not self._posting:
            self._posting = True
            self._loop.call_soon_threadsafe(self._post)

    def _post(self) -> None:
        self._posting = False  # first: what is appended from here on is seen below, or posted by the next call
        steps: list[tuple[list[RequestOutput], EngineNews]] = []
        while self._steps:
            steps.append(self._steps.popleft())
        per_ingress: defaultdict[Connection, list[tuple[int, RequestOutput]]] = defaultdict(list)
        for output in _merged([outputs for outputs, _ in steps]):
            admission = self._running.get(output.request_id)
            if admission is None:
                continue  # it was given up
            per_ingress[admission.connection].append((admission.stream, output))
            if output.finish_reason is not None:
                self._end(admission)
        news = self._publisher.rows([told for _, told in steps])
        for connection in self._lines | per_ingress.keys() if news else per_ingress:
            connection.post(per_ingress.get(connection, ()), news)

    # -- inside

    def _forget_refused(self, connection: Connection, request_id: str) -> None:
        """The call of a request that was refused does not come, as its ingress needs none."""
        meeting = self._meetings.get(request_id)
        if meeting is None or meeting.deadline is None:
            return
        admission = meeting.admission.result()
        if admission.connection is connection and admission.ended.done() and admission.ended.result() is not None:
            meeting.deadline.cancel()
            del self._meetings[request_id]

    def _call_missed(self, admission: Admission) -> None:
        del self._meetings[admission.request_id]
        if not admission.ended.done():
            self._abort_engine(admission)
            self._fail(admission, NOT_HELD)

    def _fail(self, admission: Admission, reason: str) -> None:
        error = RequestOutput(request_id=admission.request_id, finish_reason=FinishReason.ERROR, error=reason)
        admission.connection.post([(admission.stream, error)])
        self._end(admission)

    def _abort(self, admission: Admission, reason: FinishReason = FinishReason.ABORT) -> None:
        self._abort_engine(admission, reason)
        self._end(admission)

    def _abort_engine(self, admission: Admission, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._engine is not None:
            self._engine.abort(admission.request_id, reason)

    def _end(self, admission: Admission) -> None:
        self._running.pop(admission.request_id, None)
        if not admission.ended.done():
            admission.ended.set_result(None)


def _merged(steps: list[list[RequestOutput]]) -> Iterable[RequestOutput]:
    """The outputs of consecutive steps, those of the same request as one."""
    if len(steps) == 1:
        return steps[0]
    per_request: defaultdict[str, list[RequestOutput]] = defaultdict(list)
    for outputs in steps:
        for output in outputs:
            per_request[output.request_id].append(output)
    return [frames.merge(outputs) for outputs in per_request.values()]
