"""TPU slices that are not here: libtpu describes them by name and compiles for their devices on any machine."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from numpy.typing import NDArray

from backends.jax.hardware import INSTALL_LIBTPU, libtpu_is_installed
from backends.jax.slices import TopologyName, parse_topology
from engine.backend import BackendError
from engine.errors import first_line

_HARMLESS = (
    "could not determine TPU",
    "Failed to find host bounds for accelerator type",
    "Logging before InitGoogle()",
    "unexpected worker hostname",
    "=== Source Location Trace: ===",
    "learning/45eac/tfrc/runtime/",
)
"""What libtpu says on stderr about a machine that is no TPU host, each time it is loaded."""

_stderr_lock = threading.Lock()


def open_topology(name: str) -> tuple[jax.Device, ...]:
    """The devices of a slice, to compile for and not to run on. A chip is one device, of tpu7x two.

    Args:
        name: such as "v5e:4x4", "v6e:1x1" (one chip), "v5p:2x2x2".

    Raises:
        BackendError: no such slice, or libtpu is not installed; one line.
    """
    parsed = parse_topology(name)
    if not libtpu_is_installed():
        raise BackendError(f"compiling for {parsed} needs libtpu, which is not installed: {INSTALL_LIBTPU}")
    return _open(parsed)


@cache
def _open(name: TopologyName) -> tuple[jax.Device, ...]:
    _set_libtpu_environment()
    # JAX itself starts on the CPU: a TPU of this machine is left to those who run on it.
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = {}
    if (math.prod(name.shape) in (1, 8) and len(name.shape) == 2) or max(name.shape) == 1:
        options["chips_per_host_bounds"] = (*name.shape, 1, 1)[:3]  # one host; libtpu's default is 2x2x1 a host
    if name.generation == "v4":
        options["chip_config_name"] = "megacore"  # as on a TPU host: one device a chip
    try:
        with quiet_stderr():
            return tuple(topologies.get_topology_desc(topology_name=str(name), platform="tpu", **options).devices)
    except Exception as error:  # libtpu raises JaxRuntimeError, a broken installation RuntimeError or OSError
        raise BackendError(f"libtpu does not know the topology {name}: {first_line(error)}") from error


def _set_libtpu_environment() -> None:
    """What libtpu reads when it is loaded, in this process of a compiler only; it has no other way to be told."""
    # A machine's TPU belongs to one process, so libtpu refuses to be loaded twice; compilers may be many.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # As JAX sets it on TPU hosts (jax._src.cloud_tpu_init), so that programs come out as they would there.
    os.environ.setdefault("LIBTPU_INIT_ARGS", "--xla_tpu_use_enhanced_launch_barrier=true")


def take_devices(devices: tuple[jax.Device, ...], count: int) -> NDArray[Any]:
    """The first `count` devices along the slice's torus, as a flat array for a mesh axis.

    Raises:
        BackendError: the slice has fewer.
    """
    if count > len(devices):
        raise BackendError(f"tensor_parallel_size={count} is more than the slice's {len(devices)} devices")
    return np.array(devices[:count], dtype=object)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drops from file descriptor 2, where libtpu's C++ code writes, what is harmless; the rest appears at the end."""
    with _stderr_lock, tempfile.TemporaryFile() as caught:
        sys.stderr.flush()
        original = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            caught.seek(0)
            kept = [line for line in caught.read().decode(errors="replace").splitlines() if not is_harmless(line)]
            if kept:
                print("\n".join(kept), file=sys.stderr, flush=True)


def is_harmless(line: str) -> bool:
    """Whether a line on stderr is one of libtpu's remarks on not being on a TPU host."""
    return not line.strip() or any(text in line for text in _HARMLESS) or re.fullmatch(r"=+", line.strip()) is not None
