"""Transfer: the KV of one prompt at the prefill replica, from its export by the engine until it has been fetched.

Exports are read out on worker threads as the engine makes them. A call for a chunk gets all that has gathered by then,
within what suits the transport: little at a time while computing is slower than fetching, much where it is faster, as
every chunk has its cost. A chunk is kept until the decode replica says that it has it, so that it can be asked for
again if it gets lost. While much is kept, nothing further is read out before what has been is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Executor
from dataclasses import replace

from cluster.kv_transfer.messages import KVChunk, KVPiece, NoChunk
from cluster.kv_transfer.transport import KVTransport
from engine.errors import first_line
from engine.kv_connector import KVExport
from engine.request import RequestOutput


class Transfer:
    """Use it from one event loop."""

    def __init__(self, transport: KVTransport, readers: Executor, *, max_bytes: int) -> None:
        """Reading pauses when more than `max_bytes` are held; an export is read whole, however large it is."""
        self.output: RequestOutput | None = None  # the engine's last, with the token after the prompt
        self.num_calls = 0  # that are open
        self.idle_since = 0.0  # the loop's time at which the last one ended
        self.num_bytes = 0  # held: read out and not acknowledged
        self.failure: str | None = None
        self._transport = transport
        self._readers = readers
        self._max_bytes = max_bytes
        self._chunks: list[KVChunk | None] = []  # None once acknowledged
        self._num_acknowledged = 0
        self._exports: deque[KVExport] = deque()
        self._gathered: deque[KVPiece] = deque()  # read out, and in no chunk yet
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    # -- the engine's side

    def add(self, export: KVExport) -> None:
        """KV that the engine has computed, or will have when the export is read."""
        self._exports.append(export)
        self._read_on()

    def take(self, output: RequestOutput) -> None:
        """What the engine yields for the prompt. All KV that it exported before is here."""
        self.output = _with_token(self.output, output)
        if self._is_computed:
            self._read_on()
            self._tell()

    async def computed(self) -> RequestOutput | None:
        """The output with the token after the prompt, once it is computed; None if the transfer fails before."""
        while not self._is_computed and self.failure is None:
            await self._news.wait()
        return self.output if self.failure is None else None

    @property
    def _is_computed(self) -> bool:
        return self.output is not None and self.output.finish_reason is not None

    @property
    def _is_read(self) -> bool:
        """Whether all KV there will be has been read out."""
        return self._is_computed and self._reading is None

    def _read_on(self) -> None:
        if self._reading is None and self.failure is None:
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._exports and self.failure is None:
                export = self._exports.popleft()
                self._gather(await loop.run_in_executor(self._readers, _read_out, self._transport, export))
                while self._is_full:
                    await self._news.wait()
        except Exception as error:
            self.fail(f"KV could not be read: {first_line(error)}")
        finally:
            self._reading = None
            self._tell()

    def _gather(self, pieces: list[KVPiece]) -> None:
        if self.failure is not None:  # while they were read
            return
        self._gathered.extend(pieces)
        self.num_bytes += sum(piece.num_bytes for piece in pieces)
        self._tell()

    @property
    def _is_full(self) -> bool:
        """Whether reading waits for calls, which can always go on: they get what has gathered."""
        return bool(self._gathered) and self.num_bytes > self._max_bytes

    # -- the decode replica's side

    async def chunk(self, index: int, num_received: int, *, described: bool = False) -> KVChunk | NoChunk:
        """Chunk `index`, as soon as enough has been read out.

        Args:
            num_received: the decode replica has the chunks before this one.
            described: its data is asked for with `give`.
        """
        self._acknowledge(num_received)
        started = time.monotonic()
        while not self._has_chunk(index) and not self._has_ended:
            await self._news.wait()
        chunk = self._chunks[index] if index < len(self._chunks) else None
        if chunk is None or self.failure is not None:
            return NoChunk(failure=self.failure)
        answer = self._transport.describe(index, chunk) if described else chunk
        return replace(answer, waited_s=time.monotonic() - started)

    async def give(self, index: int, heads: range) -> object:
        """Some heads of a chunk that has been described, and not been acknowledged."""
        chunk = self._chunks[index] if index < len(self._chunks) else None
        if chunk is None:
            return NoChunk(failure=self.failure or "it was acknowledged")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._transport.give, chunk, heads)

    @property
    def _has_ended(self) -> bool:
        """Whether there will be no further chunk."""
        return self.failure is not None or (self._is_read and not self._gathered)

    def _has_chunk(self, index: int) -> bool:
        """Makes it of what has gathered, if it is the next."""
        if index == len(self._chunks) and (pieces := self._next_pieces()):
            self._chunks.append(KVChunk(pieces=tuple(pieces)))
            self._tell()
        return index < len(self._chunks)

    def _next_pieces(self) -> list[KVPiece]:
        """Takes what fits a chunk, once that is worth one."""
        count = num_bytes = 0
        for piece in self._gathered:
            if count and num_bytes + piece.object_bytes > self._transport.max_bytes:
                break
            count += 1
            num_bytes += piece.object_bytes
        is_all = self._is_read or self._is_full
        is_enough = num_bytes >= self._transport.min_bytes or count < len(self._gathered) or is_all
        return [self._gathered.popleft() for _ in range(count)] if is_enough else []

    def fail(self, reason: str) -> None:
        """Gives up: nothing is kept, and whoever waits or asks hears why."""
        self.failure = self.failure or reason
        self._exports.clear()
        self._gathered.clear()
        self._chunks.clear()
        self.num_bytes = 0
        self._tell()

    def _acknowledge(self, num_received: int) -> None:
        for index in range(self._num_acknowledged, min(num_received, len(self._chunks))):
            chunk = self._chunks[index]
            if chunk is not None:
                self.num_bytes -= chunk.num_bytes
            self._chunks[index] = None
            self._num_acknowledged = index + 1

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _read_out(transport: KVTransport, export: KVExport) -> list[KVPiece]:
    return transport.pack(export.start, export.blocks)


def _with_token(earlier: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """The later output, with the token of the earlier one if it has none itself."""
    if earlier is None or output.token_ids:
        return output
    return replace(output, token_ids=earlier.token_ids, logprobs=earlier.logprobs)
