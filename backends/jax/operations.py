"""The decoder's elementwise operations, in XLA or by the native CPU kernels; the model doesn't know which."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from backends.jax import native


class Operations(Protocol):
    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:
        """x [T, n] / rms(x) * weight [n], float32; rows from num_tokens [1] on may be anything finite."""
        ...

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """silu(gate) * up for gate_up [T, 2 n] float32, gate first; likewise."""
        ...


class XlaOperations:
    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:  # noqa: ARG002
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return jax.nn.silu(gate) * up


class NativeOperations:
    def rms_norm(self, x: jax.Array, weight: jax.Array, epsilon: float, num_tokens: jax.Array) -> jax.Array:
        return native.rms_norm(x, weight, num_tokens, epsilon=epsilon)

    def gated_silu(self, gate_up: jax.Array, num_tokens: jax.Array) -> jax.Array:
        return native.gated_silu(gate_up, num_tokens)
