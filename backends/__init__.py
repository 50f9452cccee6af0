"""One package per kind of hardware; each implements engine.backend.Backend. `create_backend` chooses."""

from __future__ import annotations

from engine.backend import Backend, BackendError
from engine.config import EngineConfig


def create_backend(config: EngineConfig) -> Backend:
    """The backend that `config.backend` asks for; nothing is loaded yet.

    Raises:
        BackendError: this machine or version has no such hardware.
    """
    # Imported here because each of them pulls in its hardware's libraries.
    if config.backend == "mock":
        from backends.mock import MockBackend

        return MockBackend(config)
    if config.backend in ("auto", "cpu"):
        from backends.jax.backend import JaxBackend

        return JaxBackend(config)
    raise BackendError(f"backend={config.backend} is not available yet: use backend=cpu, or leave backend out")
