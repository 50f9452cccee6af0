"""A model instead of the mock: what goes on after a kill equals what an engine left alone says, to the last logprob."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.models import tiny_llama
from tests.chaos.faults import engines, kill
from tests.cluster.apps import completion, deployed

pytestmark = pytest.mark.matrix

PROMPT = [5, 17, 200, 42, 9, 77, 123, 8, 64, 31]
TOKENS = 200
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"temperature": 0, "presence_penalty": 0.7, "logit_bias": {"300": 4}, "min_tokens": 150, "ignore_eos": False},
    {"temperature": 0.9, "seed": 3, "logprobs": 3},
    {"temperature": 0.9, "seed": 8, "n": 2},
)


def streamed(
    url: str, sampling: dict[str, Any], *, kill_after: int
) -> tuple[dict[int, str], list[float], dict[str, int]]:
    """Texts by choice, the chosen tokens' logprobs, usage. Kills the engine when so many events have come."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **sampling, "stream": True}
    body["stream_options"] = {"include_usage": True}
    texts: dict[int, str] = {}
    logprobs: list[float] = []
    usage: dict[str, int] = {}
    events = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            events += 1
            if events == kill_after:
                for process in engines("real"):
                    kill(process)
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
    return texts, logprobs, usage


def test_text_logprobs_and_usage_are_those_of_an_engine_left_alone(serve_url: str, tmp_path: Path) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 49152}  # the demo tokenizer's
    model = tiny_llama(tmp_path / "model", **sizes)
    options = {"backend": "cpu", "dtype": "float32", "model": str(model), "tokenizer": "smollm2", "warmup": False}
    with deployed(serve_url, "real", **options, max_decode_seqs=8, num_blocks=64) as url:
        alone = [streamed(url, sampling, kill_after=0) for sampling in SAMPLING]
        for number, (sampling, reference) in enumerate(zip(SAMPLING, alone, strict=True)):
            texts, logprobs, usage = streamed(url, sampling, kill_after=10 + 13 * number)
            assert texts == reference[0], sampling
            assert logprobs == pytest.approx(reference[1], abs=1e-4), sampling
            assert usage["completion_tokens"] == reference[2]["completion_tokens"], sampling
        assert completion(url).status_code == 200
