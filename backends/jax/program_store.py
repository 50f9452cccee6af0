"""Step programs that were compiled on another machine: `sliceserve compile` writes them, TPU hosts load them.

JAX's persistent cache can't carry them: its key contains a fingerprint of the attached topology and the host's libtpu
flags, and what a compile-only client wrote there no other client has been seen to read. Serialized executables can
(jax.experimental.serialize_executable; MaxText's train_compile does the same), under a key of our own: what the program
is, who compiled it, and for which devices. The host still traces and lowers, so that a program that is not exactly the
one wanted is never taken; what can't be loaded is compiled as if it weren't there.

Entries are pickles, like those of JAX's cache: whoever can write the folder can run code on the host.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from backends.jax.compilation import compile_program, compiler_options
from engine.errors import first_line

logger = logging.getLogger(__name__)

SUFFIX = ".program"


class ProgramStore:
    """Compiled programs for one set of devices, in one folder."""

    def __init__(self, folder: Path, devices: Iterable[jax.Device]) -> None:
        self._folder = folder
        self._devices = tuple(devices)
        self._loaded: list[str] = []

    @property
    def loaded(self) -> int:
        """Programs taken from the store so far."""
        return len(self._loaded)

    def key(self, lowered: jax.stages.Lowered) -> str:
        """What a program is stored under: any difference that could matter gives another key."""
        digest = hashlib.sha256()
        for part in (*self._compiler(), *self._places(), lowered.as_text()):
            digest.update(part.encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def load(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """The stored program, on this process's devices; None if there is none or it can't be loaded."""
        path = self._path(lowered)
        try:
            serialized = path.read_bytes()
        except OSError:
            return None
        try:
            program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                serialized,
                lowered.in_tree,
                lowered.out_tree,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except Exception as error:  # whatever is wrong with it, compiling helps
            logger.warning("%s can't be loaded here and is compiled instead: %s", path.name, first_line(error))
            return None
        self._loaded.append(path.name)  # from many threads
        return program

    def load_or_compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return self.load(lowered) or compile_program(lowered)

    def save(self, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Path:
        """Writes a program; readers see all of it or nothing."""
        serialized, _, _ = serialize_executable.serialize(compiled)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(lowered)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(serialized)
        os.chmod(file.name, 0o644)  # the servers' user may be another
        os.replace(file.name, path)
        return path

    def _path(self, lowered: jax.stages.Lowered) -> Path:
        return self._folder / f"{self.key(lowered)}{SUFFIX}"

    def _compiler(self) -> tuple[str, ...]:
        platform = self._devices[0].platform
        packages = ("jax", "jaxlib", "libtpu") if platform == "tpu" else ("jax", "jaxlib")
        options = str(compiler_options(self._devices[0]))
        return *map(importlib.metadata.version, packages), platform, self._devices[0].device_kind, options

    def _places(self) -> tuple[str, ...]:
        """Ids and coordinates: a program's collectives are routed for them."""
        return tuple(f"{device.id} {getattr(device, 'coords', '')}" for device in self._devices)
