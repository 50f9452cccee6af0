"""Every head shape of the supported families at their tensor-parallel sizes, on every TPU generation, compiled by
Mosaic (`make test-tpu-compile`). The file's name keeps it out of `make test`."""

from __future__ import annotations

import pytest

from tests.tpu_compile.attention import ONE_CHIP, Heads, check_memory, compile_attention

FAMILIES = (
    Heads(models="Llama-2-7B", heads=32, kv_heads=32, head_dim=128),
    Heads(models="Llama-2-7B TP=4", heads=8, kv_heads=8, head_dim=128),
    Heads(models="Llama-2-13B TP=8", heads=5, kv_heads=5, head_dim=128),
    Heads(models="Llama-3.1-8B, Mistral-7B, Qwen3-8B", heads=32, kv_heads=8, head_dim=128),
    Heads(models="Llama-3.1-8B TP=4", heads=8, kv_heads=2, head_dim=128),
    Heads(models="Llama-3.1-8B TP=8", heads=4, kv_heads=1, head_dim=128),
    Heads(models="Llama-3.1-70B, Qwen2.5-72B TP=8", heads=8, kv_heads=1, head_dim=128),
    Heads(models="Mistral-7B-v0.1 TP=2", heads=16, kv_heads=4, head_dim=128, window=4096),
    Heads(models="Llama-3.2-1B", heads=32, kv_heads=8, head_dim=64),
    Heads(models="Llama-3.2-1B TP=8", heads=4, kv_heads=1, head_dim=64),
    Heads(models="Llama-3.2-3B, Phi-4-mini", heads=24, kv_heads=8, head_dim=128),
    Heads(models="SmolLM2-135M", heads=9, kv_heads=3, head_dim=64),
    Heads(models="Gemma-2B", heads=8, kv_heads=1, head_dim=256),
    Heads(models="Gemma-7B", heads=16, kv_heads=16, head_dim=256),
    Heads(models="Gemma-2-2B", heads=8, kv_heads=4, head_dim=256, window=4096, soft_cap=50.0),
    Heads(models="Gemma-2-9B TP=4", heads=4, kv_heads=2, head_dim=256, window=4096, soft_cap=50.0),
    Heads(models="Gemma-2-27B TP=2", heads=16, kv_heads=8, head_dim=128, window=4096, soft_cap=50.0),
    Heads(models="Gemma-3-1B", heads=4, kv_heads=1, head_dim=256, window=512),
    Heads(models="Gemma-3-12B", heads=16, kv_heads=8, head_dim=256, window=1024),
    Heads(models="Phi-3-mini", heads=32, kv_heads=32, head_dim=96, window=2047),
    Heads(models="Phi-3-mini TP=4", heads=8, kv_heads=8, head_dim=96),
    Heads(models="Phi-4", heads=40, kv_heads=10, head_dim=128),
    Heads(models="Phi-4 TP=2", heads=20, kv_heads=5, head_dim=128),
    Heads(models="Qwen2.5-0.5B", heads=14, kv_heads=2, head_dim=64),
    Heads(models="Qwen2.5-1.5B", heads=12, kv_heads=2, head_dim=128),
    Heads(models="Qwen2.5-7B", heads=28, kv_heads=4, head_dim=128),
    Heads(models="Qwen2.5-7B TP=4", heads=7, kv_heads=1, head_dim=128),
    Heads(models="Qwen2.5-14B TP=8", heads=5, kv_heads=1, head_dim=128),
    Heads(models="gpt-oss-20b", heads=64, kv_heads=8, head_dim=64, window=128, sinks=True),
    Heads(models="Llama-4-Scout TP=8", heads=5, kv_heads=1, head_dim=128, chunk=8192),
)
OTHER_CACHES = (
    Heads(models="8B", heads=32, kv_heads=8, head_dim=128, dtype="int8"),
    Heads(models="8B", heads=32, kv_heads=8, head_dim=128, dtype="float8_e4m3fn"),
    Heads(models="70B TP=8", heads=8, kv_heads=1, head_dim=128, dtype="int8"),
    Heads(models="70B TP=8", heads=8, kv_heads=1, head_dim=128, dtype="float8_e4m3fn"),
    Heads(models="1B", heads=32, kv_heads=8, head_dim=64, dtype="float8_e4m3fn"),
    Heads(models="Gemma-2-2B", heads=8, kv_heads=4, head_dim=256, dtype="int8", soft_cap=50.0),
    Heads(models="Phi-4 TP=2", heads=20, kv_heads=5, head_dim=128, dtype="int8"),
    Heads(models="8B TP=4", heads=8, kv_heads=2, head_dim=128, dtype="float32"),
    *(Heads(models="8B TP=4", heads=8, kv_heads=2, head_dim=128, block_size=n) for n in (8, 16, 2048, 8192)),
    Heads(models="1B TP=8", heads=4, kv_heads=1, head_dim=64, block_size=8, dtype="int8"),
)


@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("heads", FAMILIES + OTHER_CACHES, ids=str)
@pytest.mark.parametrize("generation", ONE_CHIP)
def test_the_kernel_compiles_with_its_cache_in_place(generation: str, heads: Heads, decode_only: bool) -> None:
    check_memory(heads.attention, compile_attention(heads, generation, decode_only=decode_only))
