"""Finding TPUs by the files of a made-up machine, and what backend=… makes of what is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backends.jax.hardware import AttachedTpu, choose_platform, find_tpu
from engine.backend import BackendError
from engine.config import EngineConfig

V5E, V4, BLUEFIELD = ("0x1ae0", "0x0063"), ("0x1ae0", "0x005e"), ("0x15b3", "0xc2d5")


def machine(
    root: Path, *, pci: list[tuple[str, str]], accelerators: int = 0, groups: dict[int, int] | None = None
) -> Path:
    """A file tree with these PCI devices; `groups`: VFIO group -> index of its PCI device."""
    for index, (vendor, device) in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:00:{index:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    (root / "dev/vfio").mkdir(parents=True)
    for index in range(accelerators):
        (root / f"dev/accel{index}").touch()
    if groups:
        (root / "dev/vfio/vfio").touch()
    for group, index in (groups or {}).items():
        (root / f"dev/vfio/{group}").touch()
        members = root / f"sys/kernel/iommu_groups/{group}/devices"
        members.mkdir(parents=True)
        name = f"0000:00:{index:02x}.0"
        (members / name).symlink_to(root / "sys/bus/pci/devices" / name)
    return root


def test_older_chips_are_found_by_accel_files(tmp_path: Path) -> None:
    root = machine(tmp_path, pci=[V4] * 4, accelerators=4)
    assert find_tpu(root) == AttachedTpu(chips=4, generation="v4")


def test_newer_chips_are_found_by_their_vfio_groups(tmp_path: Path) -> None:
    root = machine(tmp_path, pci=[BLUEFIELD, *[V5E] * 8], groups={group: group for group in range(9)})
    assert find_tpu(root) == AttachedTpu(chips=8, generation="v5e")


def test_other_vfio_devices_are_no_tpu(tmp_path: Path) -> None:
    assert find_tpu(machine(tmp_path, pci=[BLUEFIELD], groups={96: 0})) is None


def test_chips_on_the_bus_that_this_process_may_not_open_do_not_count(tmp_path: Path) -> None:
    assert find_tpu(machine(tmp_path, pci=[V5E] * 4)) is None


def test_a_hidden_bus_leaves_the_generation_open(tmp_path: Path) -> None:
    found = find_tpu(machine(tmp_path, pci=[], accelerators=1))
    assert found == AttachedTpu(chips=1, generation=None)
    assert str(found) == "TPU (unknown generation), 1 chip"


def test_auto_takes_a_tpu_where_there_is_one() -> None:
    tpu = AttachedTpu(chips=4, generation="v5e")
    assert choose_platform(EngineConfig(backend="auto"), tpu, libtpu=True) == "tpu"
    assert choose_platform(EngineConfig(backend="auto"), None, libtpu=True) == "cpu"
    assert choose_platform(EngineConfig(backend="cpu"), tpu, libtpu=True) == "cpu"


def test_tpu_without_a_tpu_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"^backend=tpu, but this machine has no TPU .*use backend=cpu"):
        choose_platform(EngineConfig(backend="tpu"), None, libtpu=True)


def test_several_replicas_on_a_tpu_have_to_reserve_their_chips() -> None:
    tpu = AttachedTpu(chips=4, generation="v5e")
    with pytest.raises(BackendError, match="needs backend=tpu"):
        choose_platform(EngineConfig(data_parallel_size=2), tpu, libtpu=True)
    assert choose_platform(EngineConfig(backend="tpu", data_parallel_size=2), tpu, libtpu=True) == "tpu"


@pytest.mark.parametrize("backend", ["auto", "tpu"])
def test_a_tpu_without_libtpu_says_how_to_install_it(backend: str) -> None:
    with pytest.raises(BackendError, match=r"pip install 'jax\[tpu\]'"):
        choose_platform(EngineConfig(backend=backend), AttachedTpu(chips=8, generation="v6e"), libtpu=False)


def test_serve_refuses_a_missing_tpu_at_once_and_in_one_line() -> None:
    command = [sys.executable, "-m", "cluster.cli.main", "serve", "--backend=tpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sliceserve serve: backend=tpu, but this machine has no TPU")
    assert done.stderr.count("\n") == 1


def test_an_installed_libtpu_is_not_even_loaded_on_cpu() -> None:
    code = (
        "from backends.jax.hardware import select_platform\n"
        "from engine.config import EngineConfig\n"
        "import sys\n"
        "print(select_platform(EngineConfig(backend='auto')))\n"
        "assert 'libtpu.so' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "platform='cpu'" in done.stdout
    assert done.stderr == ""
