"""One package per kind of hardware; each implements engine.backend.Backend. `create_backend` chooses."""

from __future__ import annotations

from engine.backend import Backend, HostPlace
from engine.config import EngineConfig
from engine.model_files import is_local


def create_backend(config: EngineConfig, place: HostPlace | None = None) -> Backend:
    """The backend that `config.backend` asks for; nothing is loaded yet.

    Args:
        place: this host's if the engine has several.
    """
    # Imported here because each of them pulls in its hardware's libraries.
    if config.backend == "mock":
        from backends.mock import MockBackend

        return MockBackend(config)
    from backends.jax.backend import JaxBackend

    return JaxBackend(config, place)


def check_hardware(config: EngineConfig) -> None:
    """Checks, without starting anything, that this machine has the hardware that the options ask for.

    Raises:
        BackendError: it has not; one line.
    """
    if config.backend != "mock":
        from backends.jax import hardware

        platform = hardware.check_hardware(config)
        if config.attention != "auto":
            from backends.jax.kernels import check_attention

            check_attention(config, platform)


def check_model(config: EngineConfig) -> None:
    """Checks, from headers, a model that lies on this machine; hub models are left to the backend. Takes a second.

    Raises:
        BackendError: the model can't be served as configured; one line.
    """
    if config.backend != "mock" and is_local(config.model):
        from backends.jax.open_model import open_model

        open_model(config)
