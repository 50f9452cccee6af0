"""What one device of a tensor-parallel group holds of a model, without a device: parameters, bytes.

How a model is cut and stored is the JAX backend's own (backends.jax.layout): padded and replicated heads count as what
they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from backends.jax.layout import StoredParameter, stored_parameters
from backends.jax.model_config import ModelConfig
from backends.jax.partition import TPU_LANES, Partition
from backends.jax.storage import choose_storage

DTYPE, ITEM_BYTES = "bfloat16", 2
"""Of weights that are not quantized, of activations, and of keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One device's part of a model. Bytes and parameters are per device."""

    config: ModelConfig
    tensor_parallel: int
    quantization: str | None  # None | "int8"

    @property
    def partition(self) -> Partition:
        return Partition(model=self.config, chips=self.tensor_parallel, lanes=TPU_LANES)

    @property
    def query_heads(self) -> int:
        return self.partition.heads.heads_per_chip

    @property
    def kv_heads(self) -> int:
        return self.partition.heads.kv_heads_per_chip

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of all layers."""
        return sum(math.prod(p.shape) * p.times for p in self._layer_matrices)

    @property
    def layer_bytes(self) -> int:
        """Of the matrices of all layers."""
        return sum(p.num_bytes for p in self._layer_matrices)

    @property
    def head_parameters(self) -> int:
        """Of the output projection, which may be the embedding."""
        return math.prod(self._head.shape)

    @property
    def head_bytes(self) -> int:
        return self._head.num_bytes

    @property
    def weight_bytes(self) -> int:
        return sum(p.num_bytes for p in _stored(self))

    @property
    def _layer_matrices(self) -> list[StoredParameter]:
        return [p for p in _stored(self) if p.parameter.per_layer and p.parameter.is_matrix]

    @property
    def _head(self) -> StoredParameter:
        name = "embed" if self.config.tie_embeddings else "lm_head"
        return next(p for p in _stored(self) if p.name == name)

    @property
    def kv_bytes_per_token(self) -> int:
        """Without what a cache's layout pads."""
        return 2 * self.config.num_layers * self.kv_heads * self.config.head_dim * ITEM_BYTES

    def temporary_bytes(self, tokens: int, rows: int) -> int:
        """Activations of the widest moment of a step: residual and MLP of all tokens, logits of all rows."""
        wide = max(2 * self.partition.mlp_per_chip, (self.query_heads + 2 * self.kv_heads) * self.config.head_dim)
        activations = tokens * (4 * self.config.hidden_size * 2 + wide * ITEM_BYTES)
        return activations + 3 * rows * self.partition.vocab_per_chip * 4

    @property
    def padding(self) -> float:
        """Share of the stored heads of all devices that is padding or copies, 0 for an even cut."""
        stored = self.tensor_parallel * (self.query_heads + 2 * self.kv_heads)
        return 1 - (self.config.num_heads + 2 * self.config.num_kv_heads) / stored


@cache
def _stored(shard: Shard) -> tuple[StoredParameter, ...]:
    return stored_parameters(shard.partition, choose_storage(DTYPE, shard.quantization, packed=False))


def usable_tensor_parallel(config: ModelConfig, devices: int) -> list[int]:
    """The sizes of tensor-parallel groups that a number of devices can be divided into; no device without a head."""
    return [size for size in range(1, devices + 1) if devices % size == 0 and size <= config.num_heads]
