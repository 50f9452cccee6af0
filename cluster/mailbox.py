"""Tokens from engines to an ingress, outside of Serve's request path.

An ingress listens (`Mailbox`); an engine connects to it on the first request it gets from there (`Outbox`) and then
writes one frame per engine step with the new tokens of all requests of that ingress. TCP keeps the order and loses
nothing; nothing waits for a timer, and what piles up while the socket is full leaves as one frame. Serve's request path
carries requests, cancellation and failures, which it is made for; a token through it costs more than ten times
as much (docs/architecture.md). A connection starts with a secret that the ingress hands out with each
request, and frames hold numbers and strings only, so that a stranger can inject nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from cluster import frames
from engine.errors import first_line
from engine.request import RequestOutput

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
SECRET_TIMEOUT_S = 5.0
"""How long a connection to a mailbox may be open without having shown the secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MailboxAddress:
    """Where an ingress takes tokens. Travels with every request."""

    host: str
    port: int
    secret: str


class Inbox:
    """What has arrived for one request and is not read yet. Two or more outputs are read as one."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._pending: list[frames.Row] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, row: frames.Row) -> None:
        self._pending.append(row)
        self.wake()

    def wake(self) -> None:
        """Ends a `wait` early."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> RequestOutput | None:
        if not self._pending:
            return None
        rows, self._pending = self._pending, []
        return frames.from_rows(self.request_id, rows)

    async def wait(self) -> None:
        """Returns at the next `put` or `wake`, or at once when something is there."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Mailbox:
    """The receiving end: one per ingress process."""

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._inboxes: dict[int, Inbox] = {}
        self._next_stream = 0
        self._server: asyncio.Server | None = None
        self._receivers: set[_Receiver] = set()
        self.address: MailboxAddress | None = None

    async def start(self, host: str) -> MailboxAddress:
        """Listens on a free port of `host`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Receiver(self._secret.encode(), self.deliver, self._receivers), host, 0
        )
        port = self._server.sockets[0].getsockname()[1]
        self.address = MailboxAddress(host=host, port=port, secret=self._secret)
        return self.address

    def open(self, request_id: str) -> tuple[int, Inbox]:
        """Makes the inbox of a request; its stream number goes with the request."""
        self._next_stream += 1
        inbox = self._inboxes[self._next_stream] = Inbox(request_id)
        return self._next_stream, inbox

    def discard(self, stream: int) -> None:
        """Forgets a request; what still arrives for it is dropped."""
        self._inboxes.pop(stream, None)

    def deliver(self, rows: tuple[frames.Row, ...]) -> None:
        inboxes = self._inboxes
        for row in rows:
            inbox = inboxes.get(row[0])
            if inbox is not None:
                inbox.put(row)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for receiver in list(self._receivers):
            receiver.close()


class _Receiver(asyncio.Protocol):
    """A connection to a mailbox. Until it has shown the secret it may hold a few bytes, for a few seconds."""

    def __init__(
        self, secret: bytes, deliver: Callable[[tuple[frames.Row, ...]], None], receivers: set[_Receiver]
    ) -> None:
        """Is one of `receivers` while it is connected."""
        self._secret = secret
        self._deliver = deliver
        self._receivers = receivers
        self._shown = b""
        self._trusted = False
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._receivers.add(self)
        self._deadline = asyncio.get_running_loop().call_later(SECRET_TIMEOUT_S, self.close)

    def data_received(self, data: bytes) -> None:
        if not self._trusted:
            data = self._check(data)
        try:
            for frame in self._decoder.feed(data):
                self._deliver(frame)
        except frames.FrameError as error:  # nothing that follows can be understood
            logger.error("tokens of an engine are lost: %s", first_line(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._receivers.discard(self)
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _check(self, data: bytes) -> bytes:
        """Takes the secret off the beginning and returns what is behind it. Compares it whole: no guessing by byte."""
        missing = len(self._secret) - len(self._shown)
        self._shown += data[:missing]
        if len(self._shown) < len(self._secret):
            return b""
        if not hmac.compare_digest(self._shown, self._secret):
            self.close()
            return b""
        self._trusted = True
        if self._deadline is not None:
            self._deadline.cancel()
        return data[missing:]


class Connection(asyncio.Protocol):
    """An engine's end of the line to one ingress."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._backlog: dict[int, list[RequestOutput]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def introduce(self, secret: str) -> None:
        self._write(secret.encode())

    def post(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """Sends one step's outputs, or keeps them for the next frame while the socket is full."""
        if not self._paused:
            self._write(frames.encode(frames.to_row(stream, output) for stream, output in outputs))
            return
        for stream, output in outputs:
            self._backlog.setdefault(stream, []).append(output)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        backlog, self._backlog = self._backlog, {}
        if backlog:
            self.post([(stream, frames.merge(outputs)) for stream, outputs in backlog.items()])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._backlog.clear()
        self._on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


class Outbox:
    """The sending end: one per engine server, with a connection per ingress."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        """`on_lost` hears of each connection that ended, with all requests on it."""
        self._on_lost = on_lost
        self._connections: dict[MailboxAddress, asyncio.Task[Connection]] = {}

    async def connect(self, address: MailboxAddress) -> Connection:
        """The connection to an ingress, made at the first call.

        Raises:
            OSError, TimeoutError: the ingress can't be reached.
        """
        task = self._connections.get(address)
        if task is None:
            task = self._connections[address] = asyncio.create_task(self._open(address))
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._connections.get(address) is task:
                del self._connections[address]
            raise

    async def _open(self, address: MailboxAddress) -> Connection:
        loop = asyncio.get_running_loop()
        connection: Connection

        def lost() -> None:
            self._connections.pop(address, None)
            self._on_lost(connection)

        connection = Connection(lost)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: connection, address.host, address.port)
        connection.introduce(address.secret)
        return connection

    def close(self) -> None:
        for task in self._connections.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
