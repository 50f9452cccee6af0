"""Which options have no effect without another one, and which exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.pools import PREFILL_OVERRIDES, Pools, check_pools

if TYPE_CHECKING:
    from engine.config import EngineConfig

NEEDS: dict[str, tuple[str, ...]] = {
    "kv_store_gib": ("kv_store",),
    "kv_store_min_tokens": ("kv_store",),
    **dict.fromkeys(PREFILL_OVERRIDES, ("disagg_topo",)),
    "disagg_min_prefill_tokens": ("disagg_topo",),
    "kv_transfer_timeout_s": ("disagg_topo",),
    "kv_transfer_max_mib": ("disagg_topo",),
    "kv_transfer_object_mib": ("disagg_topo",),
    "kv_transfer_checksums": ("disagg_topo",),
    "prefill_max_replicas": ("disagg_topo",),
    "prefill_min_replicas": ("prefill_max_replicas",),
    "min_replicas": ("max_replicas",),
    "downscale_delay_s": ("max_replicas", "prefill_max_replicas"),
}
"""Options that mean nothing unless one of others is given."""


def check_rules(config: EngineConfig) -> None:
    """Checks options against each other.

    Raises:
        ValueError: one of them would be ignored, or they can't all be meant; says which to leave out.
    """
    _refuse_what_is_not_built(config)
    for name, others in NEEDS.items():
        if is_given(config, name) and not any(is_given(config, other) for other in others):
            first = others[0]
            raise ValueError(f"{name}={getattr(config, name)} needs {first}; set {first}, or leave {name} out")
    _check_backend(config)
    _check_hosts(config)
    _check_replicas(config)
    check_pools(config)
    if config.kv_store is not None and not config.enable_prefix_cache_hbm:
        raise ValueError(f"kv_store={config.kv_store} needs enable_prefix_cache_hbm=true; leave one of them out")


def is_given(config: EngineConfig, name: str) -> bool:
    """Whether an option differs from its default."""
    return bool(getattr(config, name) != type(config).model_fields[name].default)


def _refuse_what_is_not_built(config: EngineConfig) -> None:
    for name in ("enable_lora", "max_lora_rank", "enable_lora_cache", "max_num_mem_cached_lora"):
        if is_given(config, name):
            raise ValueError(f"{name}={getattr(config, name)} is not available yet; leave {name} out")
    if config.backend == "neuron":
        raise ValueError("backend=neuron is not available yet; leave backend out")


def _check_backend(config: EngineConfig) -> None:
    for name in ("mock_step_ms", "mock_prefill_ms_per_token", "mock_kv_bytes_per_token"):
        if is_given(config, name) and config.backend != "mock":
            raise ValueError(f"{name}={getattr(config, name)} needs backend=mock; leave {name} out")
    if config.tensor_parallel_size > 1 and not config.enable_jit:
        raise ValueError("enable_jit=false works with tensor_parallel_size=1 only; leave one of them out")


def _check_hosts(config: EngineConfig) -> None:
    if config.tensor_parallel_size % config.num_hosts:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} can't be dealt evenly to "
            f"num_hosts={config.num_hosts}; use a multiple"
        )
    if config.topology is not None and (config.num_hosts == 1 or config.backend in ("cpu", "mock")):
        raise ValueError("topology says where num_hosts > 1 hosts with TPUs or Neuron cores are; leave it out")


def _check_replicas(config: EngineConfig) -> None:
    started = Pools.of(config)
    beginning = "data_parallel_size" if config.disagg_topo is None else "disagg_topo"
    for prefix, count in (("", started.decode), ("prefill_", started.prefill)):
        fewest, most = getattr(config, f"{prefix}min_replicas"), getattr(config, f"{prefix}max_replicas")
        if most is not None and (fewest or 0) > most:
            raise ValueError(f"{prefix}min_replicas={fewest} is more than {prefix}max_replicas={most}")
        if most is not None and count > most:
            given = getattr(config, beginning)
            raise ValueError(f"{beginning}={given} starts {count} replicas, more than {prefix}max_replicas={most}")
    if is_given(config, "wake_timeout_s") and config.min_replicas != 0:
        raise ValueError(f"wake_timeout_s={config.wake_timeout_s:g} needs min_replicas=0; leave wake_timeout_s out")
