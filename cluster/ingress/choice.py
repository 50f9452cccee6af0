"""One choice's way from engine outputs to text: detokenized, cut at stop strings, scored."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cluster.ingress.logprobs import ScoredToken
from cluster.ingress.plan import Choice, TextOptions
from cluster.ingress.stopping import TokenStops
from engine.request import FinishReason, RequestOutput, TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What one engine step adds to one choice."""

    index: int
    text: str
    num_tokens: int  # generated since the last one, none behind a stop string
    finish_reason: str | None = None  # "stop" or "length"
    num_cached_tokens: int = 0
    scored: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[TokenLogprobs | None, ...] | None = None


class ChoiceText:
    """Turns the outputs of one engine request into Deltas. After a Delta with a finish_reason comes nothing."""

    def __init__(self, tokenizer: Tokenizer, choice: Choice, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._options = options
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, options.skip_special_tokens, after_prompt=options.continues_text
        )
        min_tokens = choice.request.sampling.min_tokens
        self._stop = (
            TokenStops(options.stop, include=options.include_stop, min_tokens=min_tokens) if options.stop else None
        )
        self._wants_scores = choice.request.sampling.logprobs is not None
        self._held: deque[ScoredToken] = deque()  # scored tokens whose text has not left yet
        self._decoded = 0  # characters out of the detokenizer
        self._sent = 0  # characters that left
        self._opened = False

    def push(self, output: RequestOutput) -> Delta:
        """The text that `output` adds; a stop string ends the choice even if the engine goes on."""
        opening, prompt_scores = "", None
        if not self._opened:
            opening, prompt_scores = self._open(output)
        if self._options.scores_only:
            return self._delta(opening, 0, FinishReason.LENGTH, output, prompt_scores)
        ids = output.token_ids
        if output.stop_token_id is not None and not self._options.include_stop:
            ids = ids[:-1]
        text, num_read = self._read(ids, output.logprobs)
        if self._stopped:
            return self._delta(opening + text, num_read, FinishReason.STOP, output, prompt_scores)
        finish = output.finish_reason
        if finish is not None:
            text += self._finish()
        return self._delta(
            opening + text,
            len(output.token_ids),
            FinishReason.STOP if self._stopped else finish,
            output,
            prompt_scores,
        )

    @property
    def _stopped(self) -> bool:
        return self._stop is not None and self._stop.stopped

    def _open(self, output: RequestOutput) -> tuple[str, tuple[TokenLogprobs | None, ...] | None]:
        self._opened = True
        if not self._options.echo:
            return "", output.prompt_logprobs
        prompt = self._choice.prompt
        if self._wants_scores and output.prompt_logprobs is not None:
            echo = IncrementalDetokenizer(self._tokenizer, self._options.skip_special_tokens)
            offset = 0
            for token_id, scores in zip(prompt.token_ids, output.prompt_logprobs, strict=True):
                self._held.append(ScoredToken(token_id=token_id, offset=offset, scores=scores))
                offset += len(echo.push((token_id,)))
        self._decoded += len(prompt.text)
        return prompt.text, output.prompt_logprobs

    def _read(self, ids: tuple[int, ...], scores: tuple[TokenLogprobs, ...] | None) -> tuple[str, int]:
        """The text of these tokens, and how many were read: none behind the one that completes a stop string."""
        if self._stop is None and not self._wants_scores:
            return self._detokenizer.push(ids), len(ids)
        text = ""
        for position, token_id in enumerate(ids):
            if self._wants_scores and scores is not None:
                self._held.append(ScoredToken(token_id=token_id, offset=self._decoded, scores=scores[position]))
            piece = self._detokenizer.push((token_id,))
            self._decoded += len(piece)
            text += piece if self._stop is None else self._stop.push(piece)
            if self._stopped:
                return text, position + 1
        return text, len(ids)

    def _finish(self) -> str:
        rest = self._detokenizer.finish()
        self._decoded += len(rest)
        return rest if self._stop is None else self._stop.finish(rest)

    def _delta(
        self,
        text: str,
        num_tokens: int,
        finish: FinishReason | None,
        output: RequestOutput,
        prompt_scores: tuple[TokenLogprobs | None, ...] | None,
    ) -> Delta:
        return Delta(
            index=self._choice.index,
            text=text,
            num_tokens=num_tokens,
            finish_reason=None if finish is None else finish.value,
            num_cached_tokens=output.num_cached_tokens,
            scored=self._release(len(text), finished=finish is not None) if self._held or self._wants_scores else (),
            prompt_scores=prompt_scores,
        )

    def _release(self, num_characters: int, *, finished: bool) -> tuple[ScoredToken, ...]:
        """Scored tokens whose text has left. At the end, those behind the cut of a stop string are dropped."""
        self._sent += num_characters
        released = []
        while self._held and self._held[0].offset < self._sent:
            released.append(self._held.popleft())
        if finished and not self._stopped:
            released.extend(self._held)
        return tuple(released)
