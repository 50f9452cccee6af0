"""Which devices JAX may use on this machine, decided before JAX starts: from files of the system, not from libtpu.

libtpu is a compiler, too, and may be installed where there is no TPU. JAX would then try to start it, which warns and
takes time, so every process tells JAX its platforms first. Nothing here imports JAX before it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backend import BackendError, HostPlace
from engine.config import EngineConfig
from engine.errors import first_line
from engine.pools import Pools

if TYPE_CHECKING:
    import jax

GOOGLE_PCI_VENDOR = "0x1ae0"
PCI_GENERATIONS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""PCI device ids of TPU chips, as JAX's own hardware_utils lists them."""

INSTALL_LIBTPU = "pip install 'jax[tpu]'"
"""Adds libtpu of the JAX that is there; the same as this project's extra `tpu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedTpu:
    """The TPU chips that this process may open."""

    chips: int
    generation: str | None  # "v5e"; None if the PCI bus is hidden

    def __str__(self) -> str:
        return f"TPU {self.generation or '(unknown generation)'}, {self.chips} chip{'s' if self.chips != 1 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a started JAX runs on."""

    platform: str  # "cpu" | "tpu"
    device_kind: str  # JAX's name: "cpu", "TPU v5 lite", …
    num_devices: int  # in this process
    memory_bytes: int | None  # per device, what the runtime gives out in all; None: the host's memory, shared


def find_tpu(root: Path = Path("/")) -> AttachedTpu | None:
    """The TPU of this machine, by its device files; takes no time and starts nothing.

    Up to v4 a chip is /dev/accelN. From v5e on it is a VFIO group /dev/vfio/N, and other hardware has those as well, so
    that the group must belong to a Google PCI device. A chip on the bus without a device file belongs to somebody else
    (a Kubernetes pod that asked for none).

    Args:
        root: where /dev and /sys are.
    """
    accelerators = [path for path in (root / "dev").glob("accel*") if re.fullmatch(r"accel\d+", path.name)]
    groups = [path for path in (root / "dev/vfio").glob("*") if path.name.isdigit()]
    chips = len(accelerators) or sum(_is_tpu_group(root, group.name) for group in groups)
    if not chips:
        return None
    generations = (PCI_GENERATIONS.get(_read(device / "device")) for device in _google_devices(root))
    return AttachedTpu(chips=chips, generation=next(filter(None, generations), None))


def _is_tpu_group(root: Path, group: str) -> bool:
    devices = (root / "sys/kernel/iommu_groups" / group / "devices").glob("*")
    return any(_read(device / "vendor") == GOOGLE_PCI_VENDOR for device in devices)


def _google_devices(root: Path) -> Iterator[Path]:
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor") == GOOGLE_PCI_VENDOR:
            yield device


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""


def libtpu_is_installed() -> bool:
    """Whether JAX would find libtpu; does not load it."""
    return importlib.util.find_spec("libtpu") is not None


def choose_platform(config: EngineConfig, tpu: AttachedTpu | None, *, libtpu: bool) -> str:
    """ "cpu" or "tpu", as the options and this machine's hardware want it.

    Args:
        libtpu: whether libtpu is installed.

    Raises:
        BackendError: a TPU is wanted and is not there, or can't be used.
    """
    if config.backend == "cpu" or (config.backend == "auto" and tpu is None):
        return "cpu"
    if tpu is None:
        raise BackendError(
            "backend=tpu, but this machine has no TPU (no chip among /dev/accel* and /dev/vfio/*); "
            "use backend=cpu, or start it on a TPU host"
        )
    if not libtpu:
        instead = "" if config.backend == "tpu" else ", or use backend=cpu"
        raise BackendError(f"this machine has a TPU ({tpu}), but libtpu is not installed: {INSTALL_LIBTPU}{instead}")
    if config.backend == "auto" and Pools.largest(config).replicas > 1:
        raise BackendError("more than one replica on a TPU needs backend=tpu, so that each reserves its own chips")
    return "tpu"


def check_hardware(config: EngineConfig) -> str:
    """The platform for these options, once this machine is found to have it; nothing is started.

    Raises:
        BackendError: it has not; one line.
    """
    return choose_platform(config, find_tpu(), libtpu=libtpu_is_installed())


def select_platform(config: EngineConfig, place: HostPlace | None = None) -> Hardware:
    """Starts JAX on the platform that the options want, with as many (simulated) CPU devices as they need of this host.

    Args:
        place: this host's among several.

    Raises:
        BackendError: the hardware is not there, does not start, has too few devices, or the other hosts don't come.
    """
    import jax

    platform = choose_platform(config, find_tpu(), libtpu=libtpu_is_installed())
    needed = config.tensor_parallel_size // config.num_hosts
    # With "tpu,cpu" arrays can also be made on the host.
    jax.config.update("jax_platforms", "cpu" if platform == "cpu" else "tpu,cpu")
    if platform == "cpu" and (needed > 1 or place is not None):
        with contextlib.suppress(RuntimeError):  # JAX runs already, in a process of others; the count below decides
            jax.config.update("jax_num_cpu_devices", needed)
    if place is not None:
        from backends.jax.hosts import join_hosts

        join_hosts(place)
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise BackendError(f"JAX does not start on this machine's {platform}: {first_line(error)}") from error
    if devices[0].platform != platform:
        raise BackendError(f"JAX runs on {devices[0].platform} in this process already, backend wants {platform}")
    if place is not None and jax.process_index() != place.rank:
        raise BackendError(f"host {place.rank} is number {jax.process_index()} of its slice: check TPU_WORKER_ID")
    if len(devices) < needed:
        most = len(devices) * config.num_hosts
        whose = "of this machine" if config.num_hosts == 1 else f"of {config.num_hosts} hosts like this one"
        raise BackendError(
            f"tensor_parallel_size={config.tensor_parallel_size} is more than the {most} {platform} devices {whose}; "
            f"use tensor_parallel_size={most} or less"
        )
    return Hardware(
        platform=platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        memory_bytes=None if platform == "cpu" else device_memory(devices[0]),
    )


def device_memory(device: jax.Device) -> int:
    """Bytes that a TPU device can give to arrays and programs in all.

    Raises:
        BackendError: the runtime does not say.
    """
    statistics = device.memory_stats() or {}
    if "bytes_limit" not in statistics:
        raise BackendError(f"the memory of {device.device_kind} is unknown: set device_memory_gib")
    return int(statistics["bytes_limit"])
