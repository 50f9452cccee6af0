"""Reading a model's architecture from config.json and GGUF, in all spellings, and refusing what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.jax.model_config import ModelConfig, RopeScaling, read_model_config
from engine.backend import BackendError
from engine.model_files import locate_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(folder: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(locate_model(str(folder)))


def refusal(folder: Path, values: dict[str, Any]) -> str:
    with pytest.raises(BackendError) as caught:
        read(folder, values)
    message = str(caught.value)
    assert message.startswith(str(folder / "config.json"))
    assert "\n" not in message
    return message


def test_a_llama_3_config(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_ROPE}, {"eos_token_id": [128001, 128009]})
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        rms_norm_eps=1e-05,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_max_position=8192),
        tie_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        sliding_window=None,
        eos_token_ids=(128001, 128009, 128008),
        bos_token_id=128000,
    )


def test_both_spellings_of_rope_are_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_ROPE})
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert read(tmp_path, {**new, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}}) == old


@pytest.mark.parametrize("rope", [{"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}])
def test_linear_scaling_in_old_and_new_words(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert read(tmp_path, {**LLAMA, "rope_scaling": rope}).rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}])
def test_no_scaling(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    assert read(tmp_path, {**LLAMA, "rope_scaling": rope}).rope_scaling == RopeScaling()


def test_missing_keys_mean_what_the_familys_config_class_says(tmp_path: Path) -> None:
    few = {key: LLAMA[key] for key in LLAMA if "_size" in key or (key.startswith("num_") and "key_value" not in key)}
    llama = read(tmp_path, {**few, "model_type": "llama"})
    assert (llama.num_kv_heads, llama.max_position, llama.rope_theta, llama.rms_norm_eps) == (32, 2048, 10000.0, 1e-6)
    assert (llama.tie_embeddings, llama.eos_token_ids, llama.bos_token_id, llama.sliding_window) == (
        False,
        (2,),
        1,
        None,
    )
    mistral = read(tmp_path, {**few, "model_type": "mistral"})
    assert (mistral.architecture, mistral.num_kv_heads, mistral.sliding_window) == ("llama", 8, 4096)
    assert read(tmp_path, {**few, "model_type": "mistral", "sliding_window": None}).sliding_window is None


def test_the_demos_gguf() -> None:
    config = read_model_config(locate_model("smollm2"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position) == (100000.0, 1e-5, 8192)
    assert (config.tie_embeddings, config.eos_token_ids, config.bos_token_id) == (True, (2,), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: LlamaFor"),
        ({"architectures": None, "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "high_freq_factor 4.0 must be above"),
        ({"rope_scaling": "linear"}, "rope_scaling is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantized with awq are not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "16"}, "num_hidden_layers is '16', not an integer from 1"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000, not an integer from 1 to 4096"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"head_dim": 63}, "head_dim 63 is no positive even number"),
        ({"hidden_size": 16}, "head_dim 0 is no positive even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, not a positive number"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list of names"),
        ({"eos_token_id": ["</s>"]}, "are not integers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, {**LLAMA, **change})


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\xfe", "[" * 100_000, "9" * 5000])
def test_a_damaged_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BackendError, match=r"config\.json"):
        read_model_config(locate_model(str(tmp_path)))
