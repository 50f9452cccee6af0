"""Architectures of well-known models, for tests that need no weights."""

from __future__ import annotations

from backends.jax.model_config import ModelConfig, RopeScaling

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(),
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    sliding_window=None,
    eos_token_ids=(128001,),
    bos_token_id=128000,
)
