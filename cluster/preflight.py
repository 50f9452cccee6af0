"""What can be said about a model before anything starts, on the machine of whoever starts it.

`serve run` shows a replica that fails with Serve's and the replica's tracebacks. A missing folder, a file cut short or
a context that the model does not have are seen from here within a second, and said in one line.
"""

from __future__ import annotations

from pathlib import Path

from backends.jax.checkpoint import open_checkpoint
from backends.jax.model_config import read_model_config
from engine.backend import BackendError
from engine.config import DEMO_MODEL, EngineConfig
from engine.model_files import locate_model


def check_model(config: EngineConfig) -> None:
    """Reads the headers of a model that lies on this machine. Models on the hub are left to the replica.

    Raises:
        BackendError: the model can't be served as configured; one line.
    """
    if config.backend == "mock" or not _is_local(config.model):
        return
    files = locate_model(config.model, weights=False)
    model = read_model_config(files)
    open_checkpoint(files, model, config.load_format, config.seed)
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise BackendError(
            f"max_model_len={config.max_model_len} is more than the model's {model.max_position} positions; "
            f"use max_model_len={model.max_position} or less"
        )


def _is_local(model: str) -> bool:
    """A path, by its looks or because something is there; anything else may be a hub id."""
    return model == DEMO_MODEL or model.startswith(("/", "./", "../", "~")) or Path(model).exists()
