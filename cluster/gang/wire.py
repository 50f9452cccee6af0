"""What travels between a gang's leader and its hosts: numbered messages with a checksum, over one TCP line per host.

The leader numbers its commands 1, 2, 3, …; every host executes them in this order and answers with the same number. A
line starts with a secret that the hosts got through Ray, and carries numbers, strings and plain arrays only.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

MAX_PAYLOAD_BYTES = 1 << 30
RECEIVE_BYTES = 1 << 18
_HEADER = struct.Struct("<BQII")  # kind, number, payload's bytes, payload's CRC-32


class Kind(IntEnum):
    HELLO = 0  # a host: [secret, rank]

    LOAD = 1  # commands of the leader
    COMPILE = 2
    WARMUP = 3
    STEP = 4
    READ_BLOCKS = 5
    WRITE_BLOCKS = 6
    DROP_BLOCKS = 7  # KV that nobody needs

    DONE = 11  # answers of a host
    FAILED = 12  # one line
    PROGRESS = 13  # [phase, done, total, detail]
    BEAT = 14  # still there


class WireError(RuntimeError):
    """What arrives can't be trusted. One line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    kind: Kind
    number: int  # of the command; 0 for what belongs to none
    payload: bytes
    checksum: int  # of the payload

    def content(self) -> Any:
        return msgpack.unpackb(self.payload, use_list=False, raw=False, strict_map_key=False)


def checksum(payload: bytes) -> int:
    return zlib.crc32(payload)


def encode(kind: Kind, number: int, payload: bytes) -> bytes:
    return _HEADER.pack(kind, number, len(payload), checksum(payload)) + payload


def pack(content: Any) -> bytes:
    return bytes(msgpack.packb(content, use_bin_type=True))


class Decoder:
    """Makes messages of bytes as they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now.

        Raises:
            WireError: they are damaged.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, number, size, expected = _HEADER.unpack_from(self._buffer)
            if size > MAX_PAYLOAD_BYTES:
                raise WireError(f"message {number} claims {size} bytes")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            if checksum(payload) != expected:
                raise WireError(f"message {number} is damaged: its checksum is not what the sender computed")
            yield Message(kind=Kind(kind), number=number, payload=payload, checksum=expected)


def receive_hello(line: socket.socket, timeout_s: float) -> tuple[str, int]:
    """The secret and the rank that a new line begins with; reads no byte more, and not many of a stranger's.

    Raises:
        WireError, OSError: it begins otherwise, or not in time.
    """
    deadline = time.monotonic() + timeout_s
    header = _receive_exactly(line, _HEADER.size, deadline)
    kind, _, size, _ = _HEADER.unpack(header)
    if kind != Kind.HELLO or size > 256:
        raise WireError("a line does not begin as a host's does")
    for message in Decoder().feed(header + _receive_exactly(line, size, deadline)):
        secret, rank = message.content()
        return str(secret), int(rank)
    raise WireError("a line does not begin as a host's does")


def _receive_exactly(line: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        line.settimeout(max(0.001, deadline - time.monotonic()))  # of all of it, however it trickles in
        piece = line.recv(size - len(data))
        if not piece:
            raise WireError("a line ended before it began")
        data += piece
    return data
