"""A model's configuration and checkpoint as the options want them, checked from headers: nothing large is read."""

from __future__ import annotations

from dataclasses import replace

from backends.jax.checkpoint import Checkpoint, open_checkpoint
from backends.jax.heads import check_heads
from backends.jax.memory import check_context
from backends.jax.model_config import ModelConfig, read_model_config
from engine.config import EngineConfig
from engine.model_files import locate_model


def open_model(config: EngineConfig) -> tuple[ModelConfig, Checkpoint]:
    """Finds and opens the model; downloads it if it is on a hub.

    Raises:
        BackendError: it can't be found, read, or served as configured; one line.
    """
    files = locate_model(config.model, weights=config.load_format != "dummy")
    model = as_configured(read_model_config(files), config)
    return model, open_checkpoint(files, model, config.load_format, config.seed)


def as_configured(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The architecture with what the options change of it.

    Raises:
        BackendError: the options ask for what it can't do; one line.
    """
    if config.sliding_window is not None:
        model = replace(model, sliding_window=config.sliding_window)
    check_context(config, model.max_position)
    check_heads(model.num_heads, config.tensor_parallel_size)
    return model
