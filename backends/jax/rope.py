"""Rotary position embeddings with the scalings that Llama checkpoints use."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from backends.jax.model_config import ModelConfig, RopeScaling

Frequencies = NDArray[np.float32]


def inverse_frequencies(config: ModelConfig) -> Frequencies:
    """[head_dim / 2] float32, scaled as the config says."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies: Frequencies = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        frequencies = (frequencies / np.float32(scaling.factor)).astype(np.float32)
    if scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1's model code)."""
    wavelength = 2 * np.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    keep = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    scaled = np.where(wavelength > longest, frequencies / scaling.factor, frequencies)
    return np.where((wavelength <= longest) & (wavelength >= shortest), blended, scaled).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosines and sines of a step's tokens, each [T, head_dim / 2] float32."""

    cos: jax.Array
    sin: jax.Array

    @classmethod
    def at(cls, positions: jax.Array, frequencies: Frequencies) -> Rotary:
        """positions [T], frequencies [head_dim / 2]."""
        angles = positions.astype(jnp.float32)[:, None] * frequencies
        return cls(cos=jnp.cos(angles), sin=jnp.sin(angles))

    def rotate(self, x: jax.Array) -> jax.Array:
        """x [T, heads, head_dim]: pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints."""
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
