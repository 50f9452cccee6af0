"""Checkpoint: the interface through which the model gets its weights, and which tensors a config asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from backends.jax.model_config import ModelConfig
from engine.backend import BackendError

Tensor = NDArray[Any]
"""float32, float16 or ml_dtypes.bfloat16."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under Hugging Face's name with its shape ([out, in] for projections), in load order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for block, projections, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
        for name, shape in projections.items():
            shapes[f"{block}.{name}.weight"] = shape
            if bias:
                shapes[f"{block}.{name}.bias"] = shape[:1]
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


class Checkpoint(ABC):
    """A model's weights on disk. Nothing is held in memory but what a caller keeps."""

    def __init__(self, config: ModelConfig, source: str) -> None:
        self.source = source  # for messages
        self.shapes: Mapping[str, tuple[int, ...]] = expected_shapes(config)

    def names(self) -> tuple[str, ...]:
        """The tensors that the config asks for."""
        return tuple(self.shapes)

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes on disk of all tensors in names(), for progress."""

    @abstractmethod
    def num_bytes(self, name: str) -> int:
        """Bytes on disk of one tensor, for progress."""

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor, [out, in] for projections; float32, float16 or bfloat16 as stored, float32 from GGUF.

        The array may be a read-only view of the file.

        Raises:
            BackendError: it can't be read, or its shape is not the config's.
        """
        array = self._read(name)
        self.check_shape(name, array.shape)
        return array

    @abstractmethod
    def _read(self, name: str) -> Tensor: ...

    def check_shape(self, name: str, found: tuple[int, ...]) -> None:
        expected = self.shapes[name]
        if tuple(found) != expected:
            raise BackendError(
                f"{self.source}: tensor {name} has shape {list(found)}, the config asks for {list(expected)}; "
                "config and weights don't belong together"
            )

    def check_names(self, found: set[str]) -> None:
        missing = [name for name in self.shapes if name not in found]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BackendError(f"{self.source}: tensor {missing[0]}{more} missing; the checkpoint is incomplete")
