"""What one device of a tensor-parallel group holds of a model: heads, columns, bytes. Formulas only.

The cut is that of the JAX backend: query heads follow their KV head, KV heads are replicated where there are more
devices than heads and padded where they don't divide; the MLP and the vocabulary are padded to equal shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.jax.model_config import ModelConfig

LANES = 128
"""Width of a TPU vector register: shares of columns are padded to it where that costs little."""
_MAX_LANE_PADDING = 0.02
_SCALE_BYTES = 4
_NORM_BYTES = 4


def head_shares(config: ModelConfig, tensor_parallel: int) -> tuple[int, int]:
    """Query and KV heads of each device, padding included."""
    group = config.num_heads // config.num_kv_heads
    if tensor_parallel <= config.num_kv_heads:
        kv_heads = -(-config.num_kv_heads // tensor_parallel)
        return kv_heads * group, kv_heads
    copies = tensor_parallel // config.num_kv_heads
    return -(-group // copies), 1


def column_share(columns: int, tensor_parallel: int) -> int:
    """A device's share of a matrix's columns, padding included."""
    share = -(-columns // tensor_parallel)
    padded = -(-share // LANES) * LANES
    return padded if padded <= share * (1 + _MAX_LANE_PADDING) else share


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One device's part of a model. Bytes and parameters are per device."""

    config: ModelConfig
    tensor_parallel: int
    quantization: str | None  # None | "int8"
    item_bytes: int = 2  # of weights that are not quantized, and of keys and values

    @property
    def query_heads(self) -> int:
        return head_shares(self.config, self.tensor_parallel)[0]

    @property
    def kv_heads(self) -> int:
        return head_shares(self.config, self.tensor_parallel)[1]

    @property
    def mlp_columns(self) -> int:
        return column_share(self.config.intermediate_size, self.tensor_parallel)

    @property
    def vocab_columns(self) -> int:
        return column_share(self.config.vocab_size, self.tensor_parallel)

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
