"""How much KV cache fits: from the device's memory, the weights and the options, to a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.backend import BackendError
from engine.config import GIB, EngineConfig

CPU_SHARE_OF_FREE_RAM = 0.5
CPU_DEFAULT_KV_BYTES = 2 * GIB
"""On CPU the memory belongs to others too: without device_memory_gib or num_blocks the KV cache stops here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPlan:
    num_blocks: int
    max_model_len: int  # tokens


def free_ram_bytes() -> int:
    """What the operating system could still give (MemAvailable), within the container's limit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _cgroup_free_bytes())
    raise BackendError("the free memory is unknown on this machine: set device_memory_gib")


def _cgroup_free_bytes() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return max(0, int(limit) - used) if limit.isdigit() else 1 << 62


def plan_kv_cache(
    config: EngineConfig,
    *,
    weight_bytes: int,
    bytes_per_block: int,
    model_max_len: int,
    max_rows: int,
    device_bytes: int,
) -> KVPlan:
    """Decides blocks and the longest sequence.

    Args:
        device_bytes: free device memory before the weights were loaded.

    Raises:
        BackendError: weights or one sequence of max_model_len don't fit, or the model has no such context.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise BackendError(
            f"max_model_len={config.max_model_len} is more than the model's {model_max_len} positions; "
            f"use max_model_len={model_max_len} or less"
        )
    wanted_len = config.max_model_len or model_max_len
    most_useful = max_rows * -(-wanted_len // config.block_size)
    num_blocks = config.num_blocks or min(
        _fitting_blocks(config, weight_bytes, bytes_per_block, device_bytes), most_useful
    )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and capacity < wanted_len and config.num_blocks is None:
        raise BackendError(
            f"the KV cache has room for {capacity} tokens, max_model_len={wanted_len} asks for more; "
            f"lower max_model_len or raise device_memory_gib"
        )
    return KVPlan(num_blocks=num_blocks, max_model_len=wanted_len if config.num_blocks else min(wanted_len, capacity))


def _fitting_blocks(config: EngineConfig, weight_bytes: int, bytes_per_block: int, device_bytes: int) -> int:
    budget = int(device_bytes * config.hbm_utilization_factor)
    kv_bytes = budget - weight_bytes
    if config.device_memory_gib is None:
        kv_bytes = min(kv_bytes, CPU_DEFAULT_KV_BYTES)
    if kv_bytes < bytes_per_block:
        raise BackendError(
            f"the weights take {weight_bytes / GIB:.1f} GiB of the budget of {budget / GIB:.1f} GiB, leaving no room "
            "for KV blocks; raise device_memory_gib or hbm_utilization_factor"
        )
    return kv_bytes // bytes_per_block


def device_memory_bytes(config: EngineConfig) -> int:
    """The memory to plan with: as the option says, else a share of the free RAM."""
    if config.device_memory_gib is not None:
        return int(config.device_memory_gib * GIB)
    return int(free_ram_bytes() * CPU_SHARE_OF_FREE_RAM)
