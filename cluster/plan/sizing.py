"""What one device of a tensor-parallel group holds of a model: heads, columns, bytes. Formulas only.

The cut is the JAX backend's own (`backends.jax.partition`): padded and replicated heads count as what they take.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.jax.model_config import ModelConfig
from backends.jax.partition import TPU_LANES, Partition

_SCALE_BYTES = 4
_NORM_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One device's part of a model. Bytes and parameters are per device."""

    config: ModelConfig
    tensor_parallel: int
    quantization: str | None  # None | "int8"
    item_bytes: int = 2  # of weights that are not quantized, and of keys and values

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
    def mlp_columns(self) -> int:
        return self.partition.mlp_per_chip

    @property
    def vocab_columns(self) -> int:
        return self.partition.vocab_per_chip

    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """[out, in] of a layer's four products: qkv, o, gate and up, down."""
        heads, hidden, head_dim = self.query_heads, self.config.hidden_size, self.config.head_dim
        return (
            ((heads + 2 * self.kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * self.mlp_columns, hidden),
            (hidden, self.mlp_columns),
        )

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of all layers."""
        return self.config.num_layers * sum(rows * columns for rows, columns in self.layer_matrices())

    @property
    def head_parameters(self) -> int:
        """Of the output projection, which may be the embedding."""
        return self.vocab_columns * self.config.hidden_size

    @property
    def layer_bytes(self) -> int:
        return self.config.num_layers * sum(self._matrix_bytes(*matrix) for matrix in self.layer_matrices())

    @property
    def head_bytes(self) -> int:
        return self._matrix_bytes(self.vocab_columns, self.config.hidden_size)

    @property
    def weight_bytes(self) -> int:
        tables = 1 if self.config.tie_embeddings else 2
        norms = (2 * self.config.num_layers + 1) * self.config.hidden_size * _NORM_BYTES
        return self.layer_bytes + tables * self.head_bytes + norms

    def _matrix_bytes(self, rows: int, columns: int) -> int:
        if self.quantization == "int8":
            return rows * columns + rows * _SCALE_BYTES
        return rows * columns * self.item_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.config.num_layers * self.kv_heads * self.config.head_dim * self.item_bytes

    def history_bytes(self, rows: int, max_model_len: int) -> int:
        """The tokens of the running sequences, which sampling reads."""
        return 4 * (rows + 1) * (max_model_len + 1)

    def table_bytes(self, rows: int) -> int:
        """Per-slot sampling state: bias, bad words and stop ids at their limits (backends/jax/slots.py)."""
        return 4 * (rows + 1) * 1024

    def temporary_bytes(self, tokens: int, rows: int) -> int:
        """Activations of the widest moment of a step: residual and MLP of all tokens, logits of all rows."""
        wide = max(2 * self.mlp_columns, (self.query_heads + 2 * self.kv_heads) * self.config.head_dim)
        return tokens * (4 * self.config.hidden_size * 2 + wide * self.item_bytes) + 3 * rows * self.vocab_columns * 4

    @property
    def padding(self) -> float:
        """Share of the stored heads of all devices that is padding or copies, 0 for an even cut."""
        stored = self.tensor_parallel * (self.query_heads + 2 * self.kv_heads)
        return 1 - (self.config.num_heads + 2 * self.config.num_kv_heads) / stored


def usable_tensor_parallel(config: ModelConfig, devices: int) -> list[int]:
    """The sizes of tensor-parallel groups that a number of devices can be divided into; no device without a head."""
    return [size for size in range(1, devices + 1) if devices % size == 0 and size <= config.num_heads]
