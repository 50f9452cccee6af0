"""The decoder's elementwise operations, in XLA or by the native CPU kernels; the model doesn't know which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from backends.jax import native


class Operations(Protocol):
    def cast(self, x: jax.Array) -> jax.Array:
        """A projection's float32 result in the type of activations."""
        ...

    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:
        """x [T, n] / rms(x) * weight [n]; rows from num_tokens [1] on may be anything finite."""
        ...

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """silu(gate) * up for gate_up [T, 2 n], gate first; likewise."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class XlaOperations:
    """In float32, with results in the type of activations: float32 on CPU, the weights' on TPU."""

    dtype: Any = jnp.float32

    def cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype)

    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        x = x.astype(jnp.float32)
        return self.cast(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight)

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
        return self.cast(jax.nn.silu(gate) * up)


class NativeOperations:
    def cast(self, x: jax.Array) -> jax.Array:
        return x

    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:
        return native.rms_norm(x, weight, num_tokens, epsilon=epsilon)

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:
        return native.gated_silu(gate_up, num_tokens)
