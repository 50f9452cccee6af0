"""How much KV cache fits: from the device's memory, the weights and the options, to a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.backend import BackendError
from engine.config import GIB, EngineConfig
from engine.pools import Pools

CPU_SHARE_OF_FREE_RAM = 0.5
CPU_DEFAULT_KV_BYTES = 2 * GIB
"""On CPU the memory belongs to others too: without device_memory_gib or num_blocks the KV cache stops here."""

_UNLIMITED = 1 << 62


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
    """What the container may still take; files it has read count as free, because they can be dropped."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())  # "max" where there is none
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return _UNLIMITED
    return max(0, limit - used + int(statistics.get("inactive_file", 0)))


def check_context(config: EngineConfig, model_max_len: int) -> None:
    """Refuses a max_model_len beyond the model's.

    Raises:
        BackendError: the model has no such context.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise BackendError(
            f"max_model_len={config.max_model_len} is more than the model's {model_max_len} positions; "
            f"use max_model_len={model_max_len} or less"
        )


def bytes_for_blocks(budget: int, taken: int, bytes_per_block: int) -> int:
    """What a budget leaves for KV blocks beside the dump block for padding; negative if it is overdrawn."""
    return budget - taken - bytes_per_block


def useful_blocks(rows: int, max_model_len: int, block_size: int) -> int:
    """KV blocks that so many sequences of the longest kind fill; more would never be used."""
    return rows * -(-max_model_len // block_size)


def plan_kv_cache(
    config: EngineConfig,
    *,
    weight_bytes: int,
    other_bytes: int,
    bytes_per_block: int,
    model_max_len: int,
    max_rows: int,
    device_bytes: int,
    kv_limit: int | None = None,
) -> KVPlan:
    """Decides blocks and the longest sequence. All bytes are those of one device.

    Args:
        other_bytes: token history and tables.
        device_bytes: free device memory before the weights are loaded.
        kv_limit: most bytes of KV cache, unless the options say how much memory or how many blocks to use.

    Raises:
        BackendError: weights, blocks or one sequence of max_model_len don't fit, or the model has no such context.
    """
    check_context(config, model_max_len)
    wanted_len = config.max_model_len or model_max_len
    budget = int(device_bytes * config.hbm_utilization_factor)
    kv_bytes = bytes_for_blocks(budget, weight_bytes + other_bytes, bytes_per_block)
    if kv_bytes < bytes_per_block:
        raise BackendError(
            f"the weights take {weight_bytes / GIB:.2f} GiB of the budget of {budget / GIB:.2f} GiB, leaving no room "
            "for KV blocks; raise device_memory_gib or hbm_utilization_factor"
        )
    most_useful = useful_blocks(max_rows, wanted_len, config.block_size)
    num_blocks = _num_blocks(config, kv_bytes, bytes_per_block, kv_limit, most_useful)
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and capacity < wanted_len:
        cause = "num_blocks" if config.num_blocks else "device_memory_gib"
        raise BackendError(
            f"the KV cache has room for {capacity} tokens, max_model_len={wanted_len} asks for more; "
            f"lower max_model_len or raise {cause}"
        )
    return KVPlan(num_blocks=num_blocks, max_model_len=min(wanted_len, capacity))


def _num_blocks(
    config: EngineConfig, kv_bytes: int, bytes_per_block: int, kv_limit: int | None, most_useful: int
) -> int:
    fitting = kv_bytes // bytes_per_block
    if config.num_blocks is not None:
        if config.num_blocks > fitting:
            raise BackendError(
                f"num_blocks={config.num_blocks} takes {config.num_blocks * bytes_per_block / GIB:.2f} GiB, of which "
                f"{kv_bytes / GIB:.2f} GiB ({fitting} blocks) are free; lower num_blocks or raise device_memory_gib"
            )
        return config.num_blocks
    if config.device_memory_gib is None and kv_limit is not None:
        fitting = max(1, min(fitting, kv_limit // bytes_per_block))
    return min(fitting, most_useful)


def cpu_memory_bytes(config: EngineConfig) -> int:
    """The memory one engine plans with on CPU, over all its simulated devices: as the option says, else a share of the
    free RAM, which the other engine replicas of this machine take a part of, too."""
    if config.device_memory_gib is not None:
        return int(config.device_memory_gib * GIB)
    return int(free_ram_bytes() * CPU_SHARE_OF_FREE_RAM) // Pools.largest(config).replicas
