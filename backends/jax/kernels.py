"""Which implementations of attention, matrix products and sampling a deployment runs."""

from __future__ import annotations

import logging
from typing import Literal

from backends.jax import native
from backends.jax.attention import LibraryAttention, NativeAttention, PagedAttention, PallasAttention, XlaAttention
from backends.jax.compilation import cache_dir, default_cache_dir
from backends.jax.heads import HeadLayout
from backends.jax.model_config import ModelConfig
from backends.jax.native.build import BuildError
from engine.backend import BackendError
from engine.config import EngineConfig

logger = logging.getLogger(__name__)

Kernels = Literal["native", "xla", "pallas", "library"]
"""native: C++ on CPU; xla: plain XLA anywhere; pallas: our TPU kernels; library: the JAX library's TPU attention."""

_CHOICES: dict[str, dict[str, Kernels]] = {
    "cpu": {"auto": "native", "native": "native", "xla": "xla"},
    "tpu": {"auto": "pallas", "pallas": "pallas", "jax": "library", "xla": "xla"},
}
"""What each value of the option `attention` means on a platform."""

_ATTENTION: dict[Kernels, type[PagedAttention]] = {
    "native": NativeAttention,
    "xla": XlaAttention,
    "pallas": PallasAttention,
    "library": LibraryAttention,
}


def paged_attention(
    kernels: Kernels, model: ModelConfig, heads: HeadLayout, *, block_size: int, dtype: str
) -> PagedAttention:
    """The attention of one chip's heads, whether it can do their shapes or not."""
    return _ATTENTION[kernels](
        num_layers=model.num_layers,
        num_heads=heads.heads_per_chip,
        num_kv_heads=heads.kv_heads_per_chip,
        head_dim=model.head_dim,
        block_size=block_size,
        window=model.sliding_window,
        dtype=dtype,
    )


def check_attention(config: EngineConfig, platform: str) -> None:
    """
    Raises:
        BackendError: the option `attention` names kernels of other hardware.
    """
    choices = _CHOICES[platform]
    if config.attention not in choices:
        raise BackendError(f"attention={config.attention} does not run on {platform}; use {', '.join(choices)}")


def choose_kernels(config: EngineConfig, model: ModelConfig, platform: str) -> Kernels:
    """The kernels that the options ask for, else the fastest that work here. Compiles the native ones if need be.

    Raises:
        BackendError: the options ask for what is not possible; one line.
    """
    check_attention(config, platform)
    kernels = _CHOICES[platform][config.attention]
    return _native_or_xla(config, model) if kernels == "native" else kernels


def _native_or_xla(config: EngineConfig, model: ModelConfig) -> Kernels:
    problem = _native_problem(config, model)
    if problem is None:
        return "native"
    if config.attention == "native":
        raise BackendError(f"attention=native is not possible: {problem}")
    logger.warning("native CPU kernels are off, plain XLA is slower: %s", problem)
    return "xla"


def _native_problem(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why the native kernels can't be used; None if they are loaded."""
    if not NativeAttention.supports(model.head_dim, config.block_size):
        return f"they don't support head_dim={model.head_dim} with block_size={config.block_size}"
    if model.hidden_size % 2:
        return "they want an even hidden size"
    try:
        native.load_kernels(cache_dir(config) or default_cache_dir())
    except (BuildError, OSError) as error:
        return str(error)
    return None
