"""Lines: a gang's leader and its hosts. Commands go out to all of them; answers, beats and failures come in.

A command leaves at once, whether or not earlier ones are answered. One thread reads all lines. The first thing that
goes wrong (a host that dies, falls silent, fails, or answers out of turn) is the gang's problem for good: who waits is
told, and `on_failure` ends all hosts.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.gang import wire
from cluster.gang.wire import Kind, Message
from cluster.sockets import LineAddress, prepare
from engine.backend import BackendError, Progress, no_progress
from engine.errors import first_line

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
WATCH_INTERVAL_S = 0.25
MOST_PASSED_S = 2 * WATCH_INTERVAL_S
"""Silence that is counted from one look to the next: if it took longer, this process stood still itself."""
BLAME_AFTER_S = 0.5
"""A host that dies makes others fail, whose messages may come first. So long, a death may still explain a failure."""


@dataclass(slots=True)
class _Peer:
    """One host as the leader sees it."""

    rank: int
    where: str
    line: socket.socket
    decoder: wire.Decoder = field(default_factory=wire.Decoder)
    silent_s: float = 0.0
    gone: bool = False

    @property
    def name(self) -> str:
        return f"host {self.rank} ({self.where})"


class Call:
    """A command that was sent to all hosts, and their answers."""

    def __init__(self, lines: Lines, number: int, checksum: int) -> None:
        self.number = number
        self.checksum = checksum
        self._lines = lines
        self.answers: dict[int, Message] = {}  # by rank

    def result(self, timeout_s: float, what: str, progress: Progress = no_progress) -> list[Message]:
        """The answers in the order of ranks.

        Args:
            progress: hears meanwhile what rank 0 says.

        Raises:
            BackendError: the gang has failed, or does now, because a host does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while news := self._lines.wait(self, deadline - time.monotonic()):
            for item in news:
                progress(*item)
        if self._lines.problem is not None:
            raise BackendError(self._lines.problem)
        missing = [str(rank) for rank in range(self._lines.num_hosts) if rank not in self.answers]
        if missing:
            hosts = f"host{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise self._lines.failed(f"{hosts} of {self._lines.num_hosts} did not finish {what} within {timeout_s:g} s")
        return [self.answers[rank] for rank in range(self._lines.num_hosts)]


class Lines:
    def __init__(self, host: str, num_hosts: int, *, silence_s: float, on_failure: Callable[[], None]) -> None:
        """Listens on a free port of `host`.

        Args:
            silence_s: a host that was not heard for so long hangs.
            on_failure: ends all hosts; called once, on any thread.
        """
        self.num_hosts = num_hosts
        self.problem: str | None = None
        self.silence_s = silence_s
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._peers: list[_Peer] = []
        self._calls: dict[int, Call] = {}  # not answered by all hosts yet
        self._news: list[tuple[Any, ...]] = []  # of rank 0's progress
        self._next_number = 1
        self._suspicion: tuple[float, str] | None = None  # when to believe it, and what
        self._watched_at = 0.0
        self._closing = False
        self._listener = socket.create_server((host, 0))
        self.address = LineAddress.new(host, self._listener.getsockname()[1])
        self._reader = threading.Thread(target=self._read, name="gang-lines", daemon=True)

    def accept(self, timeout_s: float) -> None:
        """Waits until every host has connected.

        Raises:
            BackendError: one has not.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, _Peer] = {}
        with contextlib.closing(self._listener):
            while missing := sorted(set(range(self.num_hosts)) - found.keys()):
                left = deadline - time.monotonic()
                try:
                    if left <= 0:  # strangers may come without end
                        raise TimeoutError
                    self._listener.settimeout(left)
                    line, (where, *_) = self._listener.accept()
                except TimeoutError:
                    names = ", ".join(map(str, missing))
                    raise self.failed(f"hosts {names} did not connect within {timeout_s:g} s") from None
                peer = self._greet(line, where, min(HELLO_TIMEOUT_S, left))
                if peer is not None:
                    found[peer.rank] = peer
        self._peers = [found[rank] for rank in range(self.num_hosts)]
        self._reader.start()

    def _greet(self, line: socket.socket, where: str, timeout_s: float) -> _Peer | None:
        """A host that knows the secret; anybody else is sent away."""
        try:
            secret, rank = wire.receive_hello(line, timeout_s)
            if not self.address.is_secret(secret) or not 0 <= rank < self.num_hosts:
                raise wire.WireError("a stranger has connected")
            prepare(line)
        except (OSError, ValueError, TypeError, wire.WireError) as error:
            logger.warning("a connection from %s is refused: %s", where, first_line(error))
            line.close()
            return None
        line.settimeout(None)
        return _Peer(rank=rank, where=where, line=line)

    def send(self, kind: Kind, payload: bytes, *, answered: bool = True) -> Call:
        """Sends a command to all hosts and returns without waiting for them.

        Raises:
            BackendError: the gang has failed.
        """
        with self._sending:
            if self.problem is not None:
                raise BackendError(self.problem)
            number, self._next_number = self._next_number, self._next_number + 1
            data = wire.encode(kind, number, payload)
            call = Call(self, number, wire.checksum(payload))
            if answered:
                with self._changed:
                    self._calls[number] = call
            for peer in self._peers:
                try:
                    peer.line.sendall(data)
                except OSError as error:
                    raise self.failed(f"{peer.name} can't be reached: {first_line(error)}") from error
        return call

    def wait(self, call: Call, timeout_s: float) -> list[tuple[Any, ...]]:
        """Waits for all answers, for a failure, or so long; comes back early, and not empty-handed, with news."""

        def enough() -> bool:
            return bool(self._news) or self.problem is not None or len(call.answers) == self.num_hosts

        with self._changed:
            self._changed.wait_for(enough, timeout_s)
            news, self._news = self._news, []
        return news

    def failed(self, reason: str) -> BackendError:
        """Takes the whole gang down. Returns what to raise: the first reason there was."""
        with self._changed:
            first = self.problem is None and not self._closing
            if self.problem is None:
                self.problem = reason
            self._changed.notify_all()
        if first:
            logger.error("the gang ends: %s", reason)
            self._shut()  # first: hosts that hear of it end by themselves, however long the rest takes
            self._on_failure()
        return BackendError(self.problem)

    def retire(self) -> None:
        """From now on it is no failure when hosts end, and nothing is sent to them."""
        with self._changed:
            self._closing = True
            self.problem = self.problem or "the gang is closed"
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Lets go of the hosts, which end when they notice, and waits so long until all lines have ended."""
        self.retire()
        self._listener.close()
        self._shut()
        if self._reader.ident is not None:
            self._reader.join(timeout_s)
        if self._reader.is_alive():
            logger.warning("not all hosts of the gang ended within %g s", timeout_s)

    # -- the reading thread

    def _read(self) -> None:
        try:
            self._read_all()
        except Exception as error:  # nobody else would notice what comes
            logger.exception("the lines of a gang are not read any more")
            self.failed(f"internal error: {type(error).__name__}: {first_line(error)}")

    def _read_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._watched_at = time.monotonic()
            for peer in self._peers:
                selector.register(peer.line, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select(WATCH_INTERVAL_S):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                        key.data.line.close()
                self._watch()

    def _receive(self, peer: _Peer) -> bool:
        """Takes what a host has sent; False when its line has ended."""
        try:
            data = peer.line.recv(wire.RECEIVE_BYTES)
            for message in peer.decoder.feed(data):
                self._take(peer, message)
        except OSError as error:
            data, reason = b"", f"{peer.name} has died: {first_line(error)}"
        except (ValueError, wire.WireError) as error:
            data, reason = b"", f"{peer.name} can't be trusted: {first_line(error)}"
        else:
            reason = f"{peer.name} has died: its process is gone"
        peer.silent_s = 0.0
        peer.gone = not data
        if peer.gone and not self._closing:
            self.failed(reason)
        return not peer.gone

    def _take(self, peer: _Peer, message: Message) -> None:
        match message.kind:
            case Kind.DONE:
                self._answered(peer, message)
            case Kind.PROGRESS:
                with self._changed:
                    self._news.append(message.content())
                    self._changed.notify_all()
            case Kind.FAILED:
                reason = f"{peer.name}: {message.payload.decode()}"
                self._suspicion = self._suspicion or (time.monotonic() + BLAME_AFTER_S, reason)
            case Kind.BEAT:
                pass
            case _:
                raise wire.WireError(f"it sent a message of kind {message.kind.name}")

    def _answered(self, peer: _Peer, message: Message) -> None:
        with self._changed:
            call = self._calls.get(message.number)
            if call is None or peer.rank in call.answers:
                raise wire.WireError(f"it answered command {message.number}, which nobody waits for")
            earlier = [other for number, other in self._calls.items() if number < message.number]
            if any(peer.rank not in other.answers for other in earlier):
                raise wire.WireError(f"it answered command {message.number} before an earlier one")
            call.answers[peer.rank] = message
            if len(call.answers) == self.num_hosts:
                del self._calls[message.number]
                self._changed.notify_all()

    def _watch(self) -> None:
        now = time.monotonic()
        passed_s = min(now - self._watched_at, MOST_PASSED_S)
        self._watched_at = now
        if self._suspicion is not None and now >= self._suspicion[0]:
            self.failed(self._suspicion[1])
        for peer in self._peers:
            peer.silent_s += passed_s
            if not peer.gone and peer.silent_s > self.silence_s and self.problem is None:
                self.failed(f"{peer.name} hangs: not heard for {self.silence_s:g} s")

    def _shut(self) -> None:
        """Ends the lines from this side. A host's own end is then what is read from its line last."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.line.shutdown(socket.SHUT_WR)
