"""The demo model on two simulated devices, which the server sets up itself, behind the real command line."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.server import demo_server

OPTIONS = ("--dtype=float32", "--max_running_seqs=8", "--max_model_len=256", "--num_blocks=64")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_two_devices_answer_as_one_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with demo_server(log, *OPTIONS, "--tensor-parallel-size=2") as url:
        assert "cpu x2 (float32" in log.read_text()
        body = {"model": "SmolLM2-135M-Instruct", "messages": QUESTION, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
