"""GGUF metadata in the words of a Hugging Face config.json, so that one reader checks both.

Llama 3's rope scaling is the exception that needs work: GGUF stores the resulting factor of each frequency (tensor
`rope_freqs.weight`) instead of the four numbers it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backend import BackendError
from engine.gguf_header import GGUFHeader

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_F32 = 0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3.x uses; checked against the stored factors."""


def hf_config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """What config.json would say about the model in a GGUF file.

    Raises:
        BackendError: an architecture or rope scaling that is not supported, or a key that is missing.
    """
    arch = header.architecture
    if arch not in _ARCHITECTURES:
        raise BackendError(
            f"{header.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    if header.metadata.get(f"{arch}.expert_count"):
        raise BackendError(f"{header.path}: mixture-of-experts models are not supported")
    meta = {key.removeprefix(f"{arch}."): value for key, value in header.metadata.items()}
    heads = _required(header, meta, "attention.head_count")
    hidden = _required(header, meta, "embedding_length")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": _required(header, meta, "feed_forward_length"),
        "num_hidden_layers": _required(header, meta, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": meta.get("attention.key_length", hidden // heads),
        "max_position_embeddings": _required(header, meta, "context_length"),
        # Stored as float32: 1e-5 would come back as 9.99999974e-06.
        "rms_norm_eps": float(f"{_required(header, meta, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "sliding_window": meta.get("attention.sliding_window"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(header.metadata),
    }
    if meta.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise BackendError(f"{header.path}: rotary embedding of a part of each head is not supported")
    config["rope_scaling"] = _rope_scaling(header, meta, config)
    return config


def _required(header: GGUFHeader, meta: Mapping[str, Any], key: str) -> Any:
    value = meta.get(key)
    if not isinstance(value, int | float) or value <= 0:
        found = "is missing" if value is None else f"is {str(value)[:40]}, not one positive number"
        raise BackendError(f"{header.path}: metadata key {header.architecture}.{key} {found}")
    return value


def _vocab_size(header: GGUFHeader) -> int:
    if "token_embd.weight" not in header.tensors:
        raise BackendError(f"{header.path}: tensor token_embd.weight is missing; the file holds no language model")
    return header.tensors["token_embd.weight"].shape[0]


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[Any]:
    """Ends of sequence, of turn, and of a message that calls a tool."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return [token_id for token_id in ids if token_id is not None]


def _rope_scaling(header: GGUFHeader, meta: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, config)
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0
    if kind == "none" and "rope.scale_linear" not in meta:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    return {"rope_type": kind, "factor": factor}  # refused by the reader, by name


def _llama3_scaling(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Finds the numbers that give the stored frequency factors."""
    info = header.tensors["rope_freqs.weight"]
    if info.ggml_type != _F32:
        raise BackendError(f"{header.path}: tensor rope_freqs.weight is not stored as float32")
    stored = np.fromfile(header.path, np.float32, count=math.prod(info.shape), offset=info.offset)
    original = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    scaling = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3}
    if isinstance(original, int):
        scaling["original_max_position_embeddings"] = original
    expected = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    if expected.shape != stored.shape or not np.allclose(expected, stored, rtol=1e-3):
        raise BackendError(
            f"{header.path}: rope_freqs.weight holds other factors than Llama 3's scaling; not supported"
        )
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """What llama.cpp writes for a scaling: wavelengths are multiplied by these, [head_dim / 2]."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    factors: NDArray[np.float64] = 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors
