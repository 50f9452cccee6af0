"""One instance of a Vertex AI prediction request, as Hex-LLM's container takes it."""

from __future__ import annotations

from pydantic import Field

from cluster.ingress.protocol.base import Int, SamplingFields
from cluster.ingress.protocol.completion import DEFAULT_MAX_TOKENS


class VertexInstance(SamplingFields):
    prompt: str
    max_tokens: Int = Field(DEFAULT_MAX_TOKENS, ge=1)
    raw_response: bool = False  # True: the generated text alone, without "Prompt:\n…\nOutput:\n" before it
