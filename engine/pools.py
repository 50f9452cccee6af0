"""Prefill and decode pools: how many replicas each has, and in which options they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from engine.config import EngineConfig

PREFILL_OVERRIDES = {
    "prefill_tensor_parallel_size": "tensor_parallel_size",
    "prefill_num_hosts": "num_hosts",
    "prefill_topology": "topology",
    "prefill_block_size": "block_size",
    "prefill_num_blocks": "num_blocks",
    "prefill_max_num_batched_tokens": "max_num_batched_tokens",
    "prefill_max_seqs": "max_decode_seqs",
}
"""Options of the prefill pool, and those whose values they take where they are not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Replicas per pool. Without a prefill pool, the others compute all prompts."""

    prefill: int
    decode: int

    @property
    def replicas(self) -> int:
        return self.prefill + self.decode

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        if config.disagg_topo is None:
            return cls(prefill=0, decode=config.data_parallel_size)
        return cls.parse(config.disagg_topo)

    @classmethod
    def parse(cls, topology: str) -> Self:
        """Reads `disagg_topo`.

        Raises:
            ValueError: it is not two positive numbers.
        """
        numbers = [part.strip() for part in topology.split(",")]
        if len(numbers) != 2 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
            raise ValueError(f"disagg_topo={topology!r}: give prefill and decode replicas as P,D, for example 1,2")
        return cls(prefill=int(numbers[0]), decode=int(numbers[1]))


def check_pools(config: EngineConfig) -> None:
    """Checks the options about pools.

    Raises:
        ValueError: they don't go together, or the prefill pool can't be as they say.
    """
    if config.disagg_topo is None:
        for name in ("disagg_min_prefill_tokens", "prefill_min_replicas", "prefill_max_replicas", *PREFILL_OVERRIDES):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} is about prefill pools; set disagg_topo, or leave {name} out")
        return
    Pools.parse(config.disagg_topo)
    if config.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} with disagg_topo={config.disagg_topo}: disagg_topo says "
            "how many replicas there are; leave data_parallel_size out"
        )
    prefill_config(config)


def prefill_config(config: EngineConfig) -> EngineConfig:
    """The options of a prefill replica.

    Raises:
        ValueError: they exclude each other.
    """
    assert config.disagg_topo is not None
    values = config.model_dump()
    for name, overridden in PREFILL_OVERRIDES.items():
        own = values.pop(name)
        if own is not None:
            values[overridden] = own
    values |= {
        "disagg_topo": None,
        "disagg_min_prefill_tokens": None,
        "data_parallel_size": Pools.parse(config.disagg_topo).prefill,
        "min_replicas": config.prefill_min_replicas,
        "max_replicas": config.prefill_max_replicas,
        "prefill_min_replicas": None,
        "prefill_max_replicas": None,
    }
    return type(config)(**values)
