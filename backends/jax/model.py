"""One decoder for all model families: which parameters it has, and its forward pass over a ragged batch of tokens.

Families differ by ModelConfig and small layer variants. The parameters are one pytree whose arrays carry logical axis
names (`Source.axes`); layers are stacked and looped over on the device, or unrolled where XLA would copy slices. The
forward pass is what one chip computes with its part of the parameters; `Collectives` puts the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from backends.jax.attention import AttentionInputs, PagedAttention
from backends.jax.collectives import Collectives
from backends.jax.model_config import ModelConfig
from backends.jax.operations import Operations
from backends.jax.rope import Rotary, inverse_frequencies
from backends.jax.weights import Weight

Params = Mapping[str, Any]
"""{"embed", "final_norm", "lm_head"?: leaves; "layers": stacked leaves by name, or a tuple of such mappings}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint tensor."""

    tensor: str  # without "model.layers.N." for a layer's
    axes: tuple[str, ...]  # logical names of its dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the decoder: on each chip, its parts of some tensors, one behind the other."""

    name: str
    sources: tuple[Source, ...]
    per_layer: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        """Logical names of its dimensions, without the layer axis."""
        return self.sources[0].axes

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) > 1


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """The decoder's parameters, in load order."""
    qkv = (("self_attn.q_proj", "q_heads"), ("self_attn.k_proj", "kv_heads"), ("self_attn.v_proj", "kv_heads"))
    gate_up = (("mlp.gate_proj", "mlp"), ("mlp.up_proj", "mlp"))
    layer = [
        _norm("input_norm", "input_layernorm.weight"),
        *_linear("qkv", qkv, "hidden", bias=config.attention_bias),
        *_linear("o", (("self_attn.o_proj", "hidden"),), "q_heads", bias=config.attention_bias),
        _norm("post_norm", "post_attention_layernorm.weight"),
        *_linear("gate_up", gate_up, "hidden", bias=config.mlp_bias),
        *_linear("down", (("mlp.down_proj", "hidden"),), "mlp", bias=config.mlp_bias),
    ]
    head = () if config.tie_embeddings else (_vocabulary("lm_head", "lm_head.weight"),)
    return (
        _vocabulary("embed", "model.embed_tokens.weight"),
        *layer,
        _norm("final_norm", "model.norm.weight", per_layer=False),
        *head,
    )


def _norm(name: str, tensor: str, *, per_layer: bool = True) -> Parameter:
    return Parameter(name=name, sources=(Source(tensor=tensor, axes=("hidden",)),), per_layer=per_layer)


def _vocabulary(name: str, tensor: str) -> Parameter:
    return Parameter(name=name, sources=(Source(tensor=tensor, axes=("vocab", "hidden")),), per_layer=False)


def _linear(name: str, modules: tuple[tuple[str, str], ...], in_axis: str, *, bias: bool) -> list[Parameter]:
    """One projection made of several modules (module, output axis)."""
    weights = tuple(Source(tensor=f"{module}.weight", axes=(out_axis, in_axis)) for module, out_axis in modules)
    biases = tuple(Source(tensor=f"{module}.bias", axes=(out_axis,)) for module, out_axis in modules)
    matrix = Parameter(name=name, sources=weights)
    return [matrix, Parameter(name=f"{name}_bias", sources=biases)] if bias else [matrix]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The forward pass. It holds no arrays; parameters and cache are arguments."""

    config: ModelConfig
    attention: PagedAttention
    operations: Operations
    collectives: Collectives

    def __call__(
        self, params: Params, cache: jax.Array, token_ids: jax.Array, inputs: AttentionInputs
    ) -> tuple[jax.Array, jax.Array]:
        """token_ids [T] -> hidden states after the final norm [T, hidden], and the updated cache."""
        x = self.collectives.take_rows(params["embed"], token_ids)
        rotary = Rotary.at(inputs.positions, inverse_frequencies(self.config))

        def one_layer(index: jax.Array, layer: Params, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = self._norm(x, layer["input_norm"], inputs)
            qkv = self._split(layer, "qkv", h, inputs).reshape(h.shape[0], -1, self.config.head_dim)
            attended, cache = self.attention(qkv, rotary, cache, index, inputs)
            x = x + self._join(layer, "o", attended.reshape(h.shape[0], -1), inputs)
            h = self._norm(x, layer["post_norm"], inputs)
            inner = self.operations.gated_silu(self._split(layer, "gate_up", h, inputs), inputs.num_tokens)
            return x + self._join(layer, "down", inner, inputs), cache

        x, cache = for_each_layer(params["layers"], self.config.num_layers, one_layer, x, cache)
        return self._norm(x, params["final_norm"], inputs), cache

    def logits(self, params: Params, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> [R, vocab_per_chip] float32; rows from num_rows [1] on may be anything finite."""
        head: Weight = params["embed"] if self.config.tie_embeddings else params["lm_head"]
        return head.linear(hidden, num_rows)

    def _norm(self, x: jax.Array, weight: jax.Array, inputs: AttentionInputs) -> jax.Array:
        normed = self.operations.rms_norm(x, weight, self.config.rms_norm_eps, inputs.num_tokens)
        return self.collectives.gather_tokens(normed)

    def _split(self, layer: Params, name: str, x: jax.Array, inputs: AttentionInputs) -> jax.Array:
        """A projection to this chip's part of the features, [T, in] -> [T, out]."""
        y = self.operations.cast(layer[name].linear(x, inputs.num_tokens))
        return _with_bias(y, layer, name)

    def _join(self, layer: Params, name: str, x: jax.Array, inputs: AttentionInputs) -> jax.Array:
        """A projection from this chip's part of the features, added up over the chips."""
        y = self.operations.cast(layer[name].linear(x, inputs.num_tokens))
        return _with_bias(self.collectives.combine(y), layer, name)


def _with_bias(y: jax.Array, layer: Params, name: str) -> jax.Array:
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)


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
