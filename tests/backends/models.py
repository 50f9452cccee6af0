"""Tiny Llama models with random weights for tests, made by transformers and torch (imported when called only)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def tiny_llama(
    folder: Path,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    vocab_size: int = 320,
    head_dim: int | None = None,
    max_position: int = 512,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    sliding_window: int | None = None,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    seed: int = 0,
) -> Path:
    """Saves a randomly initialised Llama (Mistral if it has a sliding window) in Hugging Face's format; returns folder.

    Weights are spread wider than at the start of a training, and norms and biases differ from 1 and 0, so that logits
    have clear maxima and nothing can be left out unnoticed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    common: dict[str, Any] = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "tie_word_embeddings": tie,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab_size,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    if sliding_window is None:
        model = LlamaForCausalLM(LlamaConfig(**common, attention_bias=attention_bias, mlp_bias=mlp_bias))
    else:
        model = MistralForCausalLM(MistralConfig(**common, sliding_window=sliding_window))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * values)
            else:
                parameter.copy_(values * (0.1 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5))
    shards = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **shards)
    return folder


def save_as_gguf(folder: Path, file: Path, *, tensor_type: str = "F32") -> Path:
    """Writes a folder made by tiny_llama (float32, one shard) as GGUF, converted as llama.cpp does; returns file."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads, layers = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"))
    rope = config["rope_parameters"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_tensor("rope_freqs.weight", _llama3_rope_freqs(rope, config["head_dim"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    kind = gguf.GGMLQuantizationType[tensor_type]
    for name, tensor in load_file(folder / "model.safetensors").items():
        n = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
        if n:
            halves = tensor.reshape(n, 2, tensor.shape[0] // n // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        alias = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(alias, tensor)
        else:
            writer.add_tensor(alias, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _llama3_rope_freqs(rope: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    low_wavelength = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wavelength = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
