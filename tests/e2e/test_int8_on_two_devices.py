"""The demo model with int8 weights on two simulated devices, behind the real command line and HTTP."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.e2e.server import demo_server

QUESTION = "What is the capital of France? Answer in one sentence."


def test_int8_weights_on_two_devices_answer_an_easy_question_as_bfloat16_does_on_one(tmp_path: Path) -> None:
    options = ("--quantization=int8", "--tensor-parallel-size=2", "--max_running_seqs=2", "--max_model_len=256")
    log = tmp_path / "log"
    with demo_server(log, *options, "--warmup=false") as url:
        said = log.read_text()
        assert "int8 weights" in said
        assert "cpu x2" in said
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        assert answer.choices[0].message.content == "The capital of France is Paris."
