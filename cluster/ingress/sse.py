"""Server-sent events of a stream, written once per engine step.

This is the hot path: a chunk is a constant prefix, the new text as a JSON string, and a constant suffix. No object is
built and serialized per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.ingress.choice import Delta
from cluster.ingress.disconnect import unless_disconnected
from cluster.ingress.errors import ClientDisconnectedError, to_api_error
from cluster.ingress.generation import Usage
from cluster.ingress.plan import Job
from cluster.ingress.style import Style
from engine.text.tokenizer import Tokenizer

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients skip: the stream is alive, if only waiting for an engine."""
KEEP_ALIVE_S = 10.0
"""Longest silence of a stream. Proxies on the way cut off what says nothing for half a minute or more."""

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class ChunkWriter:
    """Writes a job's deltas as chunks of its style."""

    def __init__(self, job: Job, style: Style, tokenizer: Tokenizer) -> None:
        self._job, self._style, self._tokenizer = job, style, tokenizer
        self._usage = Usage.of(job)
        head = {"id": job.id, "object": style.chunk_object, "created": job.created, "model": job.model}
        self._head = f"data: {encode_json(head)[:-1]},"
        self._begin = [f'{self._head}"choices":[{{"index":{choice.index},' for choice in job.choices]
        self._begin_text = [begin + style.chunk_open for begin in self._begin]
        self._usage_tail = ',"usage":null' if job.include_usage else ""
        self._end = f',"logprobs":null,"finish_reason":null}}]{self._usage_tail}}}\n\n'
        self._end_text = style.chunk_close + self._end
        self._is_plain = not job.continuous_usage and all(c.request.sampling.logprobs is None for c in job.choices)
        self._to_open = {choice.index for choice in job.choices} if style.chunk_first else set()

    def write(self, delta: Delta) -> bytes:
        """The chunks of one delta; empty when it has nothing to show yet."""
        self._usage.count(delta)
        index = delta.index
        if self._is_plain and index not in self._to_open and delta.finish_reason is None:
            return f"{self._begin_text[index]}{encode_json(delta.text)}{self._end_text}".encode() if delta.text else b""
        return "".join(self._chunks(delta)).encode()

    def _chunks(self, delta: Delta) -> list[str]:
        begin, chunks = self._begin[delta.index], []
        if delta.index in self._to_open:
            self._to_open.remove(delta.index)
            chunks.append(f"{begin}{self._style.chunk_first}{self._tail(None)}")
        if delta.text or delta.scored or (self._job.continuous_usage and delta.num_tokens):
            text = f"{self._style.chunk_open}{encode_json(delta.text)}{self._style.chunk_close}"
            chunks.append(f"{begin}{text}{self._tail(None, self._logprobs(delta))}")
        if delta.finish_reason is not None:
            chunks.append(f"{begin}{self._style.chunk_empty}{self._tail(delta.finish_reason)}")
        return chunks

    def _tail(self, finish_reason: str | None, logprobs: str = "null") -> str:
        usage = f',"usage":{encode_json(self._usage.body())}' if self._job.continuous_usage else self._usage_tail
        return f',"logprobs":{logprobs},"finish_reason":{encode_json(finish_reason)}}}]{usage}}}\n\n'

    def _logprobs(self, delta: Delta) -> str:
        top = self._job.choices[delta.index].request.sampling.logprobs
        return "null" if top is None else encode_json(self._style.logprobs(self._tokenizer, delta.scored, top))

    def end(self) -> bytes:
        """What closes a complete stream: the usage, if asked for, and [DONE]."""
        if not self._job.include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{encode_json(self._usage.body())}}}\n\n'.encode() + DONE


async def event_stream(
    first: Delta, deltas: AsyncGenerator[Delta, None], writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    """A stream's bytes, engine step by engine step. An error on the way becomes the last event."""
    try:
        async with aclosing(deltas):
            yield writer.write(first)
            async for delta in deltas:
                chunk = writer.write(delta)
                if chunk:
                    yield chunk
            yield writer.end()
    except Exception as error:
        yield error_event(error)


def error_event(error: Exception) -> bytes:
    return f"data: {encode_json(to_api_error(error).body())}\n\n".encode()


class EventStream(Response):
    """Sends a byte stream as it comes and closes it, which aborts the engine's work, when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: Mapping[str, str], timeout_s: float) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._timeout_s = timeout_s
        self._is_quiet = True  # nothing was sent since the last check

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientDisconnectedError, OSError):
            pass  # nobody is left to be told
        finally:
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in self._chunks:
                    self._is_quiet = False
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError as error:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._is_quiet:
                with contextlib.suppress(OSError):  # who writes the stream notices, too
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._is_quiet = True
