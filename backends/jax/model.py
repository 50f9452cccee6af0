"""One decoder for all model families: which parameters it has, and its forward pass over a ragged batch of tokens.

Families differ by ModelConfig and small layer variants. The parameters are one pytree whose arrays carry logical axis
names (`Parameter.axes`); layers are stacked and looped over on the device, or unrolled where XLA would copy slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from backends.jax.attention import AttentionInputs, PagedAttention
from backends.jax.model_config import ModelConfig
from backends.jax.operations import Operations
from backends.jax.rope import Rotary, inverse_frequencies
from backends.jax.weights import Weight

Params = Mapping[str, Any]
"""{"embed", "final_norm", "lm_head"?: leaves; "layers": stacked leaves by name, or a tuple of such mappings}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the decoder and the checkpoint tensors it is made of (concatenated along their first axis)."""

    name: str
    tensors: tuple[str, ...]  # without "model.layers.N." for a layer's
    axes: tuple[str, ...]  # logical names, without the layer axis
    kind: Literal["matrix", "vector"]
    per_layer: bool = True


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """The decoder's parameters, in load order."""
    qkv = tuple(f"self_attn.{part}_proj" for part in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    layer = [
        Parameter(name="input_norm", tensors=("input_layernorm.weight",), axes=("hidden",), kind="vector"),
        *_linear("qkv", qkv, ("heads", "hidden"), bias=config.attention_bias),
        *_linear("o", ("self_attn.o_proj",), ("hidden", "heads"), bias=config.attention_bias),
        Parameter(name="post_norm", tensors=("post_attention_layernorm.weight",), axes=("hidden",), kind="vector"),
        *_linear("gate_up", gate_up, ("mlp", "hidden"), bias=config.mlp_bias),
        *_linear("down", ("mlp.down_proj",), ("hidden", "mlp"), bias=config.mlp_bias),
    ]
    head = () if config.tie_embeddings else (_vocabulary("lm_head", "lm_head.weight"),)
    return (
        _vocabulary("embed", "model.embed_tokens.weight"),
        *layer,
        Parameter(name="final_norm", tensors=("model.norm.weight",), axes=("hidden",), kind="vector", per_layer=False),
        *head,
    )


def _vocabulary(name: str, tensor: str) -> Parameter:
    return Parameter(name=name, tensors=(tensor,), axes=("vocab", "hidden"), kind="matrix", per_layer=False)


def _linear(name: str, modules: tuple[str, ...], axes: tuple[str, str], *, bias: bool) -> list[Parameter]:
    matrix = Parameter(name=name, tensors=tuple(f"{m}.weight" for m in modules), axes=axes, kind="matrix")
    if not bias:
        return [matrix]
    vector = Parameter(name=f"{name}_bias", tensors=tuple(f"{m}.bias" for m in modules), axes=axes[:1], kind="vector")
    return [matrix, vector]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The forward pass. It holds no arrays; parameters and cache are arguments."""

    config: ModelConfig
    attention: PagedAttention
    operations: Operations

    def __call__(
        self, params: Params, cache: jax.Array, token_ids: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, jax.Array]:
        """token_ids [T] -> hidden states after the final norm [T, hidden] float32, and the updated cache."""
        x = params["embed"].take_rows(token_ids)
        rotary = Rotary.at(inputs.positions, inverse_frequencies(self.config))

        def one_layer(index: jax.Array, layer: Params, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = self._norm(x, layer["input_norm"], inputs)
            qkv = linear(layer, "qkv", h, inputs).reshape(h.shape[0], -1, self.config.head_dim)
            attended, cache = self.attention(qkv, rotary, cache, index, inputs)
            x = x + linear(layer, "o", attended.reshape(h.shape[0], -1), inputs)
            h = self._norm(x, layer["post_norm"], inputs)
            inner = self.operations.gated_silu(linear(layer, "gate_up", h, inputs), inputs.num_tokens)
            return x + linear(layer, "down", inner, inputs), cache

        x, cache = for_each_layer(params["layers"], self.config.num_layers, one_layer, x, cache)
        return self._norm(x, params["final_norm"], inputs), cache

    def logits(self, params: Params, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> [R, vocab] float32; rows from num_rows [1] on may be anything finite."""
        head: Weight = params["embed"] if self.config.tie_embeddings else params["lm_head"]
        return head.linear(hidden, num_rows)

    def _norm(self, x: jax.Array, weight: jax.Array, inputs: AttentionInputs) -> jax.Array:
        return self.operations.rms_norm(x, weight, self.config.rms_norm_eps, inputs.num_tokens)


def linear(layer: Params, name: str, x: jax.Array, inputs: AttentionInputs) -> jax.Array:
    """A layer's projection with its bias, if it has one; [T, in] -> [T, out] float32."""
    y: jax.Array = layer[name].linear(x, inputs.num_tokens)
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias


LayerFunction = Callable[[jax.Array, Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def for_each_layer(
    layers: Any, num_layers: int, body: LayerFunction, x: jax.Array, cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs body(index, layer, x, cache) through all layers: a device loop over stacked ones, unrolled over a tuple."""
    if isinstance(layers, tuple):
        for index, layer in enumerate(layers):
            x, cache = body(jnp.int32(index), layer, x, cache)
        return x, cache

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return body(index, select_layer(layers, index), *carry)

    x, cache = jax.lax.fori_loop(0, num_layers, step, (x, cache))
    return x, cache


def select_layer(layers: Params, index: jax.Array) -> Params:
    """One layer's view of stacked parameters."""
    return {
        name: leaf.at_layer(index)
        if hasattr(leaf, "at_layer")
        else jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
        for name, leaf in layers.items()
    }
