"""Compiles the C++ kernels for the machine they run on, once, into the user's cache folder.

`make install` does it ahead of time; otherwise the first server start does. Without a compiler
the backend falls back to plain XLA, which is several times slower on CPU; nothing else changes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

SOURCES = ("ffi.cc", "attention.h", "linear.h", "linear_int8.h", "sampling.h", "elementwise.h", "parallel.h", "simd.h")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
BUILD_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels can't be compiled here; one line says why."""


def library_path(cache_dir: Path) -> Path:
    """Where the library for these sources, this CPU and this jaxlib lives."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update(" ".join((*FLAGS, jaxlib_version.__version__, platform.machine(), _cpu_features())).encode())
    return cache_dir / "native" / f"kernels-{digest.hexdigest()[:16]}.so"


def build(cache_dir: Path) -> Path:
    """Returns the compiled library, compiling it if it is not there yet.

    Raises:
        BuildError: no C++ compiler, or it failed.
    """
    target = library_path(cache_dir)
    if target.exists():
        return target
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found; `apt-get install g++` makes CPU serving several times faster")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        source = Path(__file__).parent / SOURCES[0]
        command = [compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(output)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            lines = (
                [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["?"]
            )
            raise BuildError(f"{compiler} failed: {lines[0]}") from None
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} did not finish within {BUILD_TIMEOUT_S} s") from None
        os.replace(output, target)  # atomic: another process may build the same
    return target


def _cpu_features() -> str:
    """The CPU's instruction sets, so that a cache folder shared between machines stays right."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def main() -> None:
    from backends.jax.compilation import default_cache_dir

    try:
        build(default_cache_dir())
        print("CPU kernels are compiled for this machine")
    except (BuildError, OSError) as error:
        print(f"CPU kernels are not compiled, serving on CPU will be several times slower: {error}")
