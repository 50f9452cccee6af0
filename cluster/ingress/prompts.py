"""Text to token ids. Long texts are read on a thread, so that one client's novel does not stall everybody's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.ingress.errors import invalid
from cluster.ingress.plan import Prompt, check_prompt_length
from cluster.ingress.protocol.chat import ChatRequest
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.sampling import Limits
from engine.text.tokenizer import TextError, Tokenizer

INLINE_CHARACTERS = 4096
"""Texts up to this long take well under a millisecond; handing them to a thread would cost more."""
THREADS = 2

T = TypeVar("T")


class PromptReader:
    """Templates, tokenizes and checks prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    async def read_chat(self, request: ChatRequest, limits: Limits) -> Prompt:
        """The conversation as the model's chat template writes it.

        Raises:
            ApiError: 400 when the template refuses the messages or the result is too long.
        """
        messages = [message.for_template() for message in request.messages]
        size = sum(len(message["content"]) for message in messages)

        def read() -> list[int]:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                    **request.chat_template_kwargs,
                )
            except TextError as error:
                raise invalid("messages", str(error)) from None
            return self._tokenizer.encode(text, add_special_tokens=request.add_special_tokens)

        ids = await self._run(size, read)
        check_prompt_length("messages", len(ids), limits)
        return Prompt(token_ids=tuple(ids))

    async def read_completion(self, request: CompletionRequest, limits: Limits) -> list[Prompt]:
        """The prompts in order; ids are taken as they are.

        Raises:
            ApiError: 400 when one is empty, too long, or holds an id outside the vocabulary.
        """
        return [await self._read_one(prompt, request, limits) for prompt in request.prompts]

    async def read_text(self, text: str, *, add_special_tokens: bool, limits: Limits) -> Prompt:
        ids = await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        check_prompt_length("prompt", len(ids), limits)
        return Prompt(token_ids=tuple(ids), text=text)

    async def _read_one(self, prompt: str | list[int], request: CompletionRequest, limits: Limits) -> Prompt:
        if isinstance(prompt, str):
            return await self.read_text(prompt, add_special_tokens=request.add_special_tokens, limits=limits)
        check_prompt_length("prompt", len(prompt), limits)
        self._check_ids(prompt, limits)
        text = self._tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens) if request.echo else ""
        return Prompt(token_ids=tuple(prompt), text=text)

    @staticmethod
    def _check_ids(ids: list[int], limits: Limits) -> None:
        """Before `decode`, which would fail on a stranger."""
        if min(ids) < 0 or max(ids) >= limits.info.vocab_size:
            raise invalid("prompt", f"holds an id outside the vocabulary (0 to {limits.info.vocab_size - 1})")

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
