"""The attention kernels compiled by Mosaic for chips that are not here; tests/tpu_compile has the whole matrix."""

from __future__ import annotations

import pytest

from backends.jax.attention import LibraryAttention
from tests.tpu_compile.attention import Heads, check_memory, compile_attention

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'")

LLAMA_70B = Heads(models="Llama-3.1-70B TP=8", heads=8, kv_heads=1, head_dim=128)
PHI_4 = Heads(models="Phi-4 TP=2", heads=20, kv_heads=5, head_dim=128, dtype="int8")
GPT_OSS = Heads(models="gpt-oss-20b TP=2", heads=32, kv_heads=4, head_dim=64, window=128, sinks=True)
LLAMA_8B_BY_JAX = Heads(models="Llama-3.1-8B TP=2", heads=16, kv_heads=4, head_dim=128, implementation=LibraryAttention)


@pytest.mark.parametrize(
    ("heads", "generation", "decode_only"),
    [
        (LLAMA_70B, "v5e", True),
        (LLAMA_70B, "tpu7x", False),
        (PHI_4, "v5p", True),
        (GPT_OSS, "v6e", True),
        (LLAMA_8B_BY_JAX, "v6e", False),
    ],
    ids=lambda value: str(value),
)
def test_attention_compiles_with_its_cache_in_place(heads: Heads, generation: str, decode_only: bool) -> None:
    check_memory(heads.attention, compile_attention(heads, generation, decode_only=decode_only))
