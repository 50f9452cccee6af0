"""Text to token ids. All of it may take long and runs where the request is planned, see workers.py."""

from __future__ import annotations

from cluster.ingress.errors import invalid
from cluster.ingress.plan import Prompt, check_prompt_length, check_text_length
from cluster.ingress.protocol.chat import ChatRequest
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.sampling import Limits
from engine.text.tokenizer import TextError


def read_chat(request: ChatRequest, limits: Limits) -> Prompt:
    """The conversation as the model's chat template writes it.

    Raises:
        ApiError: 400 when the template refuses the messages or the result is too long.
    """
    try:
        text = limits.tokenizer.apply_chat_template(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.chat_template_kwargs,
        )
    except TextError as error:
        raise invalid("messages", str(error)) from None
    return Prompt(token_ids=_encode("messages", text, request.add_special_tokens, limits))


def read_completion(request: CompletionRequest, limits: Limits) -> list[Prompt]:
    """The prompts in order; ids are taken as they are.

    Raises:
        ApiError: 400 when one is empty, too long, or holds an id outside the vocabulary.
    """
    return [_read_one(prompt, request, limits) for prompt in request.prompts]


def _read_one(prompt: str | list[int], request: CompletionRequest, limits: Limits) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(token_ids=_encode("prompt", prompt, request.add_special_tokens, limits), text=prompt)
    check_prompt_length("prompt", len(prompt), limits)
    _check_ids(prompt, limits)
    text = limits.tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens) if request.echo else ""
    return Prompt(token_ids=tuple(prompt), text=text)


def _encode(param: str, text: str, add_special_tokens: bool, limits: Limits) -> tuple[int, ...]:
    check_text_length(param, len(text), limits)
    try:
        ids = limits.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TextError as error:
        raise invalid(param, str(error)) from None
    check_prompt_length(param, len(ids), limits)
    return tuple(ids)


def _check_ids(ids: list[int], limits: Limits) -> None:
    """Before `decode`, which would fail on a stranger."""
    if min(ids) < 0 or max(ids) >= limits.info.vocab_size:
        raise invalid("prompt", f"holds an id outside the vocabulary (0 to {limits.info.vocab_size - 1})")
