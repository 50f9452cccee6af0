"""ModelConfig: everything the decoder must know about a model's architecture, read from config.json or GGUF metadata.

Model families are rows of a table: which defaults their config class has, and which layer variants they use. What the
decoder can't compute is refused here, by name, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backends.jax.gguf_config import hf_config_from_gguf
from engine.backend import BackendError
from engine.errors import first_line
from engine.gguf_header import read_gguf_header
from engine.model_files import ModelFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts beyond the pre-training's."""

    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only language model."""

    architecture: str  # "llama": RMS norm, rotary attention with grouped heads, gated MLP
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # tokens
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool  # the output projection is the embedding
    attention_bias: bool  # q, k, v and o projections
    mlp_bias: bool  # gate, up and down projections
    hidden_act: Literal["silu"]
    sliding_window: int | None  # tokens, the query's own included; None = all
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """A Hugging Face architecture: which decoder it is, and what keys mean that config.json leaves out."""

    architecture: str
    defaults: Mapping[str, Any]


_COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FAMILIES = {
    "LlamaForCausalLM": _Family(
        architecture="llama", defaults={**_COMMON_DEFAULTS, "max_position_embeddings": 2048, "sliding_window": None}
    ),
    "MistralForCausalLM": _Family(
        architecture="llama",
        defaults={
            **_COMMON_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_LARGEST_NUMBER = 1e38  # of float32
_MAX_LAYERS = 4096  # more can only come from a damaged file
_ROPE_TYPES = {"default": "none", "none": "none", "linear": "linear", "llama3": "llama3"}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Reads the model's architecture.

    Raises:
        BackendError: the config is missing, damaged, or describes a model that is not supported; one line.
    """
    if files.kind == "gguf":
        return _ConfigReader(files.path, hf_config_from_gguf(read_gguf_header(files.path))).read()
    path = files.path / "config.json"
    values = _read_json(path)
    generation = files.path / "generation_config.json"
    extra_eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return _ConfigReader(path, values).read(extra_eos)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, no JSON, endless
        raise BackendError(f"{path} can't be read as JSON: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise BackendError(f"{path} holds {type(values).__name__}, not an object")
    return values


class _ConfigReader:
    """Turns the words of one config.json into a ModelConfig, with errors that name file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.family = self._find_family(values)
        self.values = {**self.family.defaults, **values}

    def read(self, extra_eos: Any = None) -> ModelConfig:
        values = self.values
        self._refuse_unsupported()
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        hidden_size = self.integer("hidden_size")
        max_position = self.integer("max_position_embeddings")
        head_dim = self.integer("head_dim", default=hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise self.error(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        if head_dim < 1 or head_dim % 2:
            raise self.error(f"head_dim {head_dim} is no positive even number, as rotary embedding needs")
        rope = self._rope_values()
        return ModelConfig(
            architecture=self.family.architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=self.integer("num_hidden_layers", most=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=self.number(values, "rms_norm_eps"),
            rope_theta=self.number(rope, "rope_theta"),
            rope_scaling=self._rope_scaling(rope, max_position),
            tie_embeddings=bool(values["tie_word_embeddings"]),
            attention_bias=bool(values.get("attention_bias")),
            mlp_bias=bool(values.get("mlp_bias")),
            hidden_act="silu",
            sliding_window=None if values["sliding_window"] is None else self.integer("sliding_window"),
            eos_token_ids=self._token_ids(extra_eos, values["eos_token_id"]),
            bos_token_id=next(iter(self._token_ids(values["bos_token_id"])), None),
        )

    def _find_family(self, values: Mapping[str, Any]) -> _Family:
        names = values.get("architectures") or [_BY_MODEL_TYPE.get(str(values.get("model_type")), "")]
        if not isinstance(names, list):
            raise self.error(f"architectures is {names!r}, not a list of names")
        for name in names:
            if name in _FAMILIES:
                return _FAMILIES[name]
        found = ", ".join(str(name) for name in names if name) or str(values.get("model_type"))
        raise self.error(f"architecture {found} is not supported; supported: {', '.join(_FAMILIES)}")

    def _refuse_unsupported(self) -> None:
        if self.values["hidden_act"] not in ("silu", "swish"):
            raise self.error(f"hidden_act {self.values['hidden_act']!r} is not supported; supported: silu")
        quantization = self.values.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
            raise self.error(
                f"weights quantized with {method} are not supported; use unquantized safetensors or a GGUF file"
            )

    def _rope_values(self) -> dict[str, Any]:
        """theta and scaling in one dictionary: transformers 5 writes rope_parameters, before it were two keys."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise self.error("rope_scaling is not an object")
        values = {"rope_theta": self.values.get("rope_theta", 10000.0), **rope}
        if "rope_type" not in values:
            values["rope_type"] = values.get("type", "default")
        for source in (values, self.values):
            if source.get("partial_rotary_factor", 1.0) not in (1.0, None):
                raise self.error("partial_rotary_factor other than 1 is not supported")
        return values

    def _rope_scaling(self, rope: Mapping[str, Any], max_position: int) -> RopeScaling:
        kind = _ROPE_TYPES.get(rope["rope_type"]) if isinstance(rope["rope_type"], str) else None
        if kind is None:
            raise self.error(f"rope type {rope['rope_type']!r} is not supported; supported: default, linear, llama3")
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self.number(rope, "factor"))
        if kind == "llama3":
            factor, low, high = (self.number(rope, key) for key in _LLAMA3_KEYS)
            if high <= low:
                raise self.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
            original = self.number({_ORIGINAL: max_position, **rope}, _ORIGINAL)
            return RopeScaling(
                kind="llama3",
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position=int(original),
            )
        return RopeScaling()

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(f"{key} is {value!r}, not an integer from 1 to {most}")
        return value

    def number(self, values: Mapping[str, Any], key: str) -> float:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
            raise self.error(f"{key} is missing" if value is None else f"{key} is {value!r}, not a positive number")
        return float(value)

    def _token_ids(self, *sources: Any) -> tuple[int, ...]:
        ids: list[Any] = []
        for source in sources:
            ids += source if isinstance(source, list) else [] if source is None else [source]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise self.error(f"token ids {ids!r} are not integers")
        return tuple(dict.fromkeys(ids))

    def error(self, problem: str) -> BackendError:
        return BackendError(f"{self.path}: {problem}")
