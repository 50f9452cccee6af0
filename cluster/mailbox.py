"""The ingress' end of the lines to engines: tokens come in, requests go out, outside of Serve's request path.

An ingress listens (`Mailbox`); an engine connects to it when it is asked to, or on the first request that a Serve call
brings from there (`Outbox`), and then writes one frame per engine step with the new tokens of all requests of that
ingress and with news of the engine itself (`cluster.news`). TCP keeps the order and loses nothing; nothing waits for a
timer, and what piles up leaves as one frame. Serve's calls hold the requests' places, and carry cancellation and
failures, which they are made for; a token through Serve costs more than ten times as much (docs/architecture.md). A
connection starts with a secret that the ingress hands out with each Serve call, and frames hold numbers and strings
only, so that a stranger can inject nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import cast

from cluster import frames
from cluster.messages import Refusal
from cluster.news import NEWS, NewsReader, read_row
from cluster.request_codec import pack_request
from cluster.sockets import LineAddress, prepare
from engine.errors import first_line
from engine.request import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

SECRET_TIMEOUT_S = 5.0
"""How long a connection to a mailbox may be open without having shown the secret."""


class Inbox:
    """What has arrived for one request and is not read yet. Two or more outputs are read as one."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.refusal: Refusal | None = None  # the engine does not take it
        self._pending: list[frames.Row] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def put(self, row: frames.Row) -> None:
        if frames.is_refusal(row):
            self.refusal = frames.to_refusal(row)
        else:
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
        if not self._pending and self.refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Mailbox:
    """The receiving end: one per ingress process."""

    def __init__(self, news: NewsReader | None = None) -> None:
        """`news` hears what engines tell about themselves."""
        self._news = news
        self._inboxes: dict[int, Inbox] = {}
        self._next_stream = 0
        self._server: asyncio.Server | None = None
        self._lines: frozenset[Line] = frozenset()  # replaced, never changed: Serve's router reads it on its thread
        self.address: LineAddress | None = None

    async def start(self, host: str) -> LineAddress:
        """Listens on a free port of `host`."""
        listener = socket.create_server((host, 0))
        address = self.address = LineAddress.new(host, listener.getsockname()[1])
        self._server = await asyncio.get_running_loop().create_server(lambda: Line(address, self), sock=listener)
        return address

    def open(self, request_id: str) -> tuple[int, Inbox]:
        """Makes the inbox of a request; its stream number goes with the request."""
        self._next_stream += 1
        inbox = self._inboxes[self._next_stream] = Inbox(request_id)
        return self._next_stream, inbox

    def discard(self, stream: int) -> None:
        """Forgets a request; what still arrives for it is dropped."""
        self._inboxes.pop(stream, None)

    def line(self, replica: str, *, even_if_full: bool = False) -> Line | None:
        """The line to an engine, if requests can leave over it now."""
        lines = (line for line in self._lines if line.replica == replica)
        return next((line for line in lines if line.is_open or (even_if_full and not line.is_lost)), None)

    @property
    def replicas(self) -> set[str]:
        """The engines that have a line to here."""
        return {line.replica for line in self._lines if line.replica}

    def connected(self, line: Line) -> None:
        self._lines |= {line}

    def disconnected(self, line: Line) -> None:
        self._lines -= {line}
        if self._news is not None and line.replica and line.replica not in self.replicas:
            self._news.lost(line.replica)

    def deliver(self, replica: str, rows: tuple[frames.Row, ...]) -> None:
        """Takes a frame of an engine.

        Raises:
            FrameError, TypeError, ValueError: it makes no sense.
        """
        inboxes = self._inboxes
        for row in rows:
            inbox = inboxes.get(row[0])
            if inbox is not None:
                inbox.put(row)
            elif row[0] == NEWS and self._news is not None:
                read_row(row, replica, self._news)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in self._lines:
            line.close()


class Line(asyncio.Protocol):
    """A connection to a mailbox. Until it has shown the secret it may hold a few bytes, for a few seconds."""

    def __init__(self, address: LineAddress, mailbox: Mailbox) -> None:
        self.replica = ""  # the engine's, once it has shown the secret
        self._address = address
        self._mailbox = mailbox
        self._watchers: set[Inbox] = set()
        self._shown = b""
        self._trusted = False
        self._paused = False
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None  # of the secret, then of the next sign of life
        self._missed_signs = 0

    @property
    def is_open(self) -> bool:
        """Whether what is sent leaves now."""
        return self._transport is not None and not self._paused

    @property
    def is_lost(self) -> bool:
        """Whether the engine at the other end has gone, or has dropped all requests of this line."""
        return self._transport is None

    def watch(self, inbox: Inbox) -> None:
        """Wakes this inbox when the line is lost."""
        self._watchers.add(inbox)

    def unwatch(self, inbox: Inbox) -> None:
        self._watchers.discard(inbox)

    def send(self, stream: int, request: EngineRequest) -> None:
        self._write((stream, pack_request(request)))

    def withdraw(self, stream: int, request_id: str, *, is_finished: bool = False) -> None:
        """Nobody waits for this request any more, as its reader is gone, or has all that it wanted."""
        self._write((stream, request_id, is_finished))

    def _write(self, row: frames.Row) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode([row]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._mailbox.connected(self)
        self._deadline = asyncio.get_running_loop().call_later(SECRET_TIMEOUT_S, self.close)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare(sock)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def data_received(self, data: bytes) -> None:
        self._missed_signs = 0
        if not self._trusted:
            data = self._check(data)
        try:
            for frame in self._decoder.feed(data):
                if self.replica:
                    self._mailbox.deliver(self.replica, frame)
                else:
                    [[self.replica]] = frame
        except (frames.FrameError, TypeError, ValueError) as error:  # nothing that follows can be understood
            logger.error("tokens of an engine are lost: %s", first_line(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._mailbox.disconnected(self)
        for inbox in self._watchers:
            inbox.wake()
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _check(self, data: bytes) -> bytes:
        """Takes the secret off the beginning and returns what is behind it. Compares it whole: no guessing by byte."""
        missing = len(self._address.secret) - len(self._shown)
        self._shown += data[:missing]
        if len(self._shown) < len(self._address.secret):
            return b""
        if not self._address.is_secret(self._shown):
            self.close()
            return b""
        self._trusted = True
        self._expect_life()
        return data[missing:]

    def _expect_life(self) -> None:
        """Ends a line whose engine is silent. Counts checks, not seconds: this process may have stood still itself."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._missed_signs > frames.MISSED_SIGNS:
            logger.warning("replica %s is silent for %g s", self.replica, frames.MISSED_SIGNS * frames.SIGN_OF_LIFE_S)
            self.close()
            return
        self._missed_signs += 1
        self._deadline = asyncio.get_running_loop().call_later(frames.SIGN_OF_LIFE_S, self._expect_life)
