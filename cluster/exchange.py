"""Exchange: one request at one engine, seen from its ingress.

All ways back are watched: the inbox, the line that fills it, and the Serve call that holds the request's place. What
says first that the request is over ends it, and an engine that dies or goes silent interrupts it, which is never a wait
without end. What becomes of an interrupted request is decided elsewhere (`Continuation`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from cluster.mailbox import Inbox, Line, Mailbox
from cluster.messages import Refusal, RefusalKind
from engine.request import FinishReason, RequestOutput

LAST_FRAME_TIMEOUT_S = 10.0
"""Longest wait for the last tokens once the engine server said that the request has ended."""

NO_ENGINE = "no engine answers; it may be starting or restarting"
NOT_TAKEN = Refusal(kind=RefusalKind.UNAVAILABLE, message=NO_ENGINE)
ENGINE_GONE = Refusal(kind=RefusalKind.UNAVAILABLE, message="the engine that served this request is gone")
NEVER_TAKEN = Refusal(kind=RefusalKind.MOVED, message="the engine that was chosen is gone; try again")
LAST_FRAME_LOST = Refusal(kind=RefusalKind.UNAVAILABLE, message="the engine's last tokens did not arrive")


class InterruptedExchangeError(RuntimeError):
    """Nothing more comes from this engine, and the request has not ended. `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Exchange:
    def __init__(
        self,
        mailbox: Mailbox,
        replica: str,
        stream: int,
        inbox: Inbox,
        line: Line | None,
        call: asyncio.Task[Refusal | None],
    ) -> None:
        """`line` is the one over which the request left; None if the call takes it along."""
        self.replica = replica
        self._mailbox = mailbox
        self._stream = stream
        self._inbox = inbox
        self._line = line
        self._call = call
        self._taken = False
        self._ended = False
        self._is_finished = False  # before the engine ended it
        self._is_deaf = False  # the engine does not even say that it has the request
        self._failure: Refusal | None = None  # the engine's own, if that is how it ended
        call.add_done_callback(lambda _: inbox.wake())
        if line is not None:
            line.watch(inbox)

    async def wait_until_taken(self, deadline: float) -> None:
        """Waits for the engine's word that it has the request.

        Raises:
            InterruptedExchangeError: it does not take it, or says nothing until the deadline (in the loop's time).
        """
        try:
            async with asyncio.timeout_at(deadline):
                if not self._is_over:
                    await self._inbox.wait()
                if self._inbox.is_empty:
                    await self._arrival()
        except TimeoutError:
            self._is_deaf = True
            raise InterruptedExchangeError(NOT_TAKEN) from None
        self._taken = not self._inbox.is_empty
        if not self._taken:
            raise InterruptedExchangeError(self._reason())
        if self._line is None:  # the call took the request along; what comes back comes over a line
            self._line = self._mailbox.line(self.replica, even_if_full=True)
            if self._line is not None:
                self._line.watch(self._inbox)

    async def next(self) -> RequestOutput:
        """What the engine has yielded since the last time; the one with a finish_reason is the last.

        Raises:
            InterruptedExchangeError: there is no more, and the request has not ended. All that came has been returned.
        """
        while self._failure is None:
            await self._arrival()
            output = self._inbox.take()
            if output is None:
                raise InterruptedExchangeError(self._reason())
            self._ended = output.finish_reason is not None
            if output.finish_reason is FinishReason.ERROR:
                self._failure = Refusal(kind=RefusalKind.UNAVAILABLE, message=output.error or ENGINE_GONE.message)
                output = replace(output, finish_reason=None, error=None)
            if not _says_nothing(output):
                return output
        raise InterruptedExchangeError(self._failure)

    def finish(self) -> None:
        """Its reader has all that it wanted."""
        self._is_finished = True

    def close(self) -> None:
        """Ends the request unless it has ended. The call of one that has ended ends by itself.

        So does the call of one that was withdrawn, or whose line is lost, as soon as its engine sees that. Cancelling
        it is quicker, but not when the engine hangs: Ray, having failed to reach it, would fail to kill it later, too.
        """
        self._mailbox.discard(self._stream)
        if self._line is not None:
            self._line.unwatch(self._inbox)
        if self._ended:
            return
        if self._line is not None:
            self._line.withdraw(self._stream, self._inbox.request_id, is_finished=self._is_finished)
            if self._line.is_lost or self._is_deaf or self._is_finished:
                return
        self._call.cancel()

    @property
    def _is_cut_off(self) -> bool:
        return self._line is not None and self._line.is_lost

    @property
    def _is_over(self) -> bool:
        return self._call.done() or self._is_cut_off or self._inbox.refusal is not None

    async def _arrival(self) -> None:
        """Returns when there is something in the inbox, or nothing will come any more."""
        inbox = self._inbox
        while inbox.is_empty and not self._is_over:
            await inbox.wait()
        if self._call.done() and self._call.result() is None and not self._is_cut_off and inbox.is_empty:
            # The last frame is on its way.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_FRAME_TIMEOUT_S):
                    await inbox.wait()

    def _reason(self) -> Refusal:
        """Why nothing comes any more."""
        if self._inbox.refusal is not None:
            return self._inbox.refusal
        refusal = self._call.result() if self._call.done() else None
        if refusal is not None and not (self._is_cut_off and refusal.kind is RefusalKind.MOVED):
            return refusal
        if self._is_cut_off:
            return ENGINE_GONE if self._taken else NEVER_TAKEN
        return LAST_FRAME_LOST


def _says_nothing(output: RequestOutput) -> bool:
    return not output.token_ids and output.finish_reason is None and output.prompt_logprobs is None
