"""The engine's end of the line to an ingress: tokens go out, requests and their withdrawals come in.

An engine connects to an ingress when that asks for it, or on the first Serve call with a request from there, shows the
secret that came with it and says which replica it is. From then on the ingress sends requests over the line too, ahead
of the Serve calls that hold their places: that takes a fraction of a millisecond in place of several.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

from cluster import frames
from cluster.messages import Refusal
from cluster.request_codec import unpack_request
from cluster.sockets import LineAddress, prepare
from engine.errors import first_line
from engine.request import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Reader(Protocol):
    """Who takes what ingresses send."""

    def arrived(self, connection: Connection, stream: int, request: EngineRequest) -> None: ...

    def withdrawn(self, connection: Connection, request_id: str, *, is_finished: bool) -> None: ...

    def opened(self, connection: Connection) -> None:
        """The connection is new, or has not told some news as its socket was full: it is to be told all there is."""
        ...

    def lost(self, connection: Connection) -> None:
        """The connection has ended, with all requests on it."""
        ...


class Connection(asyncio.Protocol):
    """The line to one ingress."""

    def __init__(self, reader: Reader, forget: Callable[[], object]) -> None:
        """`forget` is called before the reader hears that the connection has ended."""
        self._reader = reader
        self._forget = forget
        self._transport: asyncio.Transport | None = None
        self._decoder = frames.Decoder()
        self._paused = False
        self._backlog: dict[int, list[RequestOutput]] = {}
        self._missed_news = False
        self._has_written = False  # since the last sign of life
        self._sign_of_life: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)

    def introduce(self, secret: str, replica: str) -> None:
        self._write(secret.encode() + frames.encode([(replica,)]))
        self._show_life()
        self._reader.opened(self)

    def post(self, outputs: Iterable[tuple[int, RequestOutput]], news: Sequence[frames.Row] = ()) -> None:
        """Sends outputs and news as one frame. While the socket is full, outputs wait for the next one."""
        if not self._paused:
            self._write(frames.encode([*(frames.to_row(stream, output) for stream, output in outputs), *news]))
            return
        for stream, output in outputs:
            self._backlog.setdefault(stream, []).append(output)
        self._missed_news |= bool(news)

    def refuse(self, stream: int, refusal: Refusal) -> None:
        """Says that a request is not taken, unless the socket is full: its Serve call says so, too, and later."""
        if not self._paused:
            self._write(frames.encode([frames.refusal_row(stream, refusal)]))

    def data_received(self, data: bytes) -> None:
        try:
            for rows in self._decoder.feed(data):
                for row in rows:
                    self._read(row)
        except (frames.FrameError, TypeError, ValueError) as error:  # nothing that follows can be trusted
            logger.error("what an ingress sends makes no sense: %s", first_line(error))
            self.close()

    def _read(self, row: frames.Row) -> None:
        match row:
            case [_, str(request_id), bool(is_finished)]:
                self._reader.withdrawn(self, request_id, is_finished=is_finished)
            case _:
                stream, content = row
                self._reader.arrived(self, stream, unpack_request(content))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        backlog, self._backlog = self._backlog, {}
        if backlog:
            self.post([(stream, frames.merge(outputs)) for stream, outputs in backlog.items()])
        if self._missed_news and not self._paused:
            self._missed_news = False
            self._reader.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._sign_of_life is not None:
            self._sign_of_life.cancel()
        self._backlog.clear()
        self._forget()
        self._reader.lost(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _show_life(self) -> None:
        """Sends an empty frame where there was nothing to send: the ingress can tell an idle engine from a hung one."""
        if not (self._has_written or self._paused):
            self._write(frames.encode([]))
        self._has_written = False
        self._sign_of_life = asyncio.get_running_loop().call_later(frames.SIGN_OF_LIFE_S, self._show_life)

    def _write(self, data: bytes) -> None:
        self._has_written = True
        if self._transport is not None:
            self._transport.write(data)


class Outbox:
    """All lines of one engine server: one per ingress."""

    def __init__(self, replica: str, reader: Reader) -> None:
        """`replica` is what the ingresses know this engine server by."""
        self._replica = replica
        self._reader = reader
        self._connections: dict[LineAddress, asyncio.Task[Connection]] = {}

    async def connect(self, address: LineAddress) -> Connection:
        """The connection to an ingress, made at the first call.

        Raises:
            OSError, TimeoutError: the ingress can't be reached.
        """
        task = self._connections.get(address)
        if task is None:
            task = self._connections[address] = asyncio.create_task(self._open(address))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may fail when nobody waits
        return await asyncio.shield(task)  # others may wait for it, too

    async def _open(self, address: LineAddress) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._reader, lambda: self._connections.pop(address, None))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: connection, address.host, address.port)
        except BaseException:
            self._connections.pop(address, None)  # the next call tries anew
            raise
        connection.introduce(address.secret, self._replica)
        return connection

    def close(self) -> None:
        for task in list(self._connections.values()):
            if task.done():  # one that failed is no longer here
                task.result().close()
            else:
                task.cancel()
