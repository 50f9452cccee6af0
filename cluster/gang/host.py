"""Host: one member of a gang. Takes the leader's commands off its line, executes them in their order, and answers.

One thread does nothing but execute, so that all hosts of a gang do the same in the same order; dispatching a step does
not wait for the device. Another thread waits for steps and answers. A host without a leader ends itself, whatever its
other threads are doing, and a host that fails says so and waits for its end: it may not go on alone.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from cluster.gang import codec, wire
from cluster.gang.kv import NOT_KEPT, KVSlice, ReadOut
from cluster.gang.shelf import Shelf
from cluster.gang.wire import Kind, Message
from cluster.sockets import LineAddress, prepare
from engine.backend import Backend, BackendError, PendingStep
from engine.errors import first_line
from engine.kv_blocks import KVBlocks, KVLostError, KVPayload, PendingBlocks, Run, joined

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
BEAT_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.2


class Host:
    def __init__(self, address: LineAddress, rank: int, backend: Backend, leader_lost: Callable[[], None]) -> None:
        """Connects to the leader and serves it on threads of its own.

        Args:
            leader_lost: called when the line has ended; must end the process, or at least all use of the devices.

        Raises:
            OSError: the leader can't be reached.
        """
        self._rank = rank
        self._backend = backend
        self._leader_lost = leader_lost
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[tuple[Message, PendingStep]] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._sending = threading.Lock()
        self._progress_at = 0.0
        self._phase = ""
        self.reads: Shelf[PendingBlocks] = Shelf()  # KV, under the leader's keys
        self.payloads: Shelf[KVPayload] = Shelf()  # KV that is to be written
        self._line = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        self._line.settimeout(None)
        prepare(self._line)
        self._send(Kind.HELLO, 0, wire.pack((address.secret, rank)))
        for task in (self._read, self._execute, self._report, self._beat):
            threading.Thread(target=task, name=f"gang{task.__name__}", daemon=True).start()

    # -- one thread each

    def _read(self) -> None:
        decoder = wire.Decoder()
        try:
            while data := self._line.recv(wire.RECEIVE_BYTES):
                for message in decoder.feed(data):
                    self._commands.put(message)
        except (OSError, ValueError, wire.WireError) as error:
            logger.error("host %d has lost its leader: %s", self._rank, first_line(error))
        self._leader_lost()

    def _execute(self) -> None:
        expected = 1
        while not self._failed.is_set():
            message = self._commands.get()
            with _Failing(self, "start", message):
                if message.number != expected:
                    raise BackendError(f"command {message.number} came in place of {expected}")
                expected += 1
                self._obey(message)

    def _report(self) -> None:
        while not self._failed.is_set():
            message, step = self._running.get()
            with _Failing(self, "finish", message):
                result = step.result()
                tokens, compiled = codec.token_checksum(result), self._backend.compilations_after_warmup
                shown = codec.pack_result(result) if self._rank == 0 else None
                self._send(Kind.DONE, message.number, wire.pack((message.checksum, tokens, compiled, shown)))

    def _beat(self) -> None:
        while self._send(Kind.BEAT, 0, b""):
            time.sleep(BEAT_INTERVAL_S)

    # -- commands

    def _obey(self, message: Message) -> None:
        match message.kind:
            case Kind.STEP:
                batch = codec.unpack_batch(message.content())
                self._running.put((message, self._backend.dispatch(batch)))
            case Kind.LOAD:
                info = self._backend.load(self._progress)
                kv_format = self._backend.kv_format() if info.capabilities.kv_exchange else None
                kv_heads = range(0) if kv_format is None else self._backend.kv_heads()
                self._send(Kind.DONE, message.number, codec.pack_host(info, kv_format, kv_heads))
            case Kind.COMPILE:
                self._backend.compile(self._progress)
                self._send(Kind.DONE, message.number, b"")
            case Kind.WARMUP:
                self._backend.warmup(self._progress)
                self._send(Kind.DONE, message.number, b"")
            case Kind.READ_BLOCKS:
                key, block_ids, num_tokens, offset = message.content()
                self.reads.put(key, self._backend.read_blocks(block_ids, num_tokens, offset))
            case Kind.WRITE_BLOCKS:
                key, block_ids, offset = message.content()
                self._backend.write_blocks(block_ids, offset, self.payloads.take(key))
            case Kind.DROP_BLOCKS:
                read, received = message.content()
                self.reads.drop(read)
                self.payloads.drop(received)
            case _:
                raise BackendError(f"the leader sent a message of kind {message.kind.name}")

    def _progress(self, phase: str, done: int, total: int, detail: str = "") -> None:
        """Rank 0 speaks for all. Not each of thousands of tensors is news."""
        now = time.monotonic()
        if self._rank == 0 and (phase != self._phase or done >= total or now - self._progress_at > PROGRESS_INTERVAL_S):
            self._phase, self._progress_at = phase, now
            self._send(Kind.PROGRESS, 0, wire.pack((phase, done, total, detail)))

    # -- KV, on any thread

    def read_out(self, key: int, timeout_s: float) -> ReadOut:
        """What there is of KV that a command of the leader reads, when the device has given it.

        Raises:
            TimeoutError: no such command came.
            BackendError: the read failed.
        """
        shares = self.reads.get(key, timeout_s).result()
        return ReadOut(
            format=self._backend.kv_format(),
            heads=tuple(share.heads for share in shares),
            num_tokens=shares[0].num_tokens if shares else 0,
        )

    def give(self, slices: Sequence[KVSlice], heads: range) -> tuple[KVBlocks, ...]:
        """Tokens of what was read out, one slice behind the other, of those heads that are here.

        Raises:
            KVLostError: the leader has had it dropped.
        """
        try:
            reads = [self.reads.get(each.key, 0.0).result() for each in slices]
        except TimeoutError:
            raise KVLostError(NOT_KEPT) from None
        runs = [Run(shares=read, first=each.first, end=each.end) for read, each in zip(reads, slices, strict=True)]
        return joined(runs, heads)

    def receive(self, keys: Sequence[int], payloads: Sequence[KVPayload], timeout_s: float) -> None:
        """Fetches KV that commands of the leader will write.

        Raises:
            KVLostError: it does not come, or is not what this host needs.
        """
        for key, payload in zip(keys, self._backend.receive_blocks(payloads, timeout_s), strict=True):
            self.payloads.put(key, payload)

    # -- the line

    def fail(self, reason: str) -> None:
        self._failed.set()
        self._send(Kind.FAILED, 0, reason.encode())

    def hang_up(self) -> None:
        """Ends the line from this side, as the end of the process does."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _send(self, kind: Kind, number: int, payload: bytes) -> bool:
        """False if there is no leader any more."""
        data = wire.encode(kind, number, payload)
        try:
            with self._sending:
                self._line.sendall(data)
        except OSError:  # the reading thread notices, too
            self._leader_lost()
            return False
        return True


class _Failing:
    """Around what a host does: an exception is told to the leader, in one line."""

    def __init__(self, host: Host, doing: str, message: Message) -> None:
        self._host = host
        self._what = f"can't {doing} {message.kind.name.lower().replace('_', ' ')} {message.number}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            return False
        if isinstance(error, BackendError):
            self._host.fail(first_line(error))
        else:
            logger.exception("%s", self._what)
            self._host.fail(f"{self._what}: {type(error).__name__}: {first_line(error)}")
        return True
