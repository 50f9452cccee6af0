"""The model to plan for: a folder, a config.json, a GGUF file, or a hub id; never its weights."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from backends.jax.model_config import ModelConfig, read_model_config
from cluster.plan.errors import PlanError
from engine.backend import BackendError
from engine.model_files import ModelFiles, is_local, locate_model

_VARIANTS = ("-instruct", "-chat", "-hf")
_SHIPPED = resources.files("cluster.plan") / "configs"


def shipped_models() -> dict[str, Path]:
    """Hub ids whose config.json comes with the package, and the folders it is in."""
    folders = sorted(Path(str(_SHIPPED)).glob("*/*/config.json"))
    return {f"{path.parent.parent.name}/{path.parent.name}": path.parent for path in folders}


def open_model_config(model: str) -> ModelConfig:
    """Reads the architecture of a model.

    Raises:
        PlanError: there is no such model, or it is not one that can be served; one line.
    """
    path = Path(model).expanduser()
    try:
        if path.is_file() and path.suffix == ".json":
            return _from_file(path)
        folder = None if is_local(model) else _find_shipped(model)
        if folder is not None:
            return read_model_config(ModelFiles(path=folder, kind="hf", source=model))
        if not is_local(model) and not _is_cached(model):
            raise PlanError(_unknown(model))
        return read_model_config(locate_model(model, weights=False))
    except BackendError as error:
        raise PlanError(str(error)) from None


def _from_file(path: Path) -> ModelConfig:
    if path.name != "config.json":
        raise PlanError(f"{path} is not called config.json; rename it, or give its folder")
    return read_model_config(ModelFiles(path=path.parent, kind="hf", source=str(path)))


def _find_shipped(model: str) -> Path | None:
    """A shipped config by hub id, with or without the owner; instruction-tuned variants have their base model's."""
    wanted = _base_name(model)
    for name, folder in shipped_models().items():
        known = _base_name(name)
        if wanted in (known, known.partition("/")[2]):
            return folder
    return None


def _base_name(model: str) -> str:
    name = model.lower()
    for variant in _VARIANTS:
        name = name.replace(variant, "")
    return name


def _is_cached(model: str) -> bool:
    """Whether the hub's cache on this machine has the model's config.json."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except (HFValidationError, OSError):
        return False


def _unknown(model: str) -> str:
    known = shipped_models()
    close = difflib.get_close_matches(_base_name(model), [name.lower() for name in known], n=3, cutoff=0.5)
    names = [name for name in known if name.lower() in close] or list(known)
    return (
        f"no model {model!r} here: give a folder with config.json, a config.json, a .gguf file, "
        f"or a hub id that is cached or known ({', '.join(names)})"
    )
