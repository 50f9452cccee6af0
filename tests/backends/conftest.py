"""The demo model as transformers has it, loaded once for all tests that compare with it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model_files import locate_model


@pytest.fixture(scope="session")
def demo_reference() -> Any:
    """SmolLM2-135M-Instruct in transformers, float32, dequantized from the same file (takes half a minute)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    files = locate_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        files.folder, gguf_file=files.path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.eval()
