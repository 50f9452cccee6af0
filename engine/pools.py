"""Prefill and decode pools: how many replicas each has, and in which options they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from engine.options import LARGEST

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
    def largest(cls, config: EngineConfig) -> Self:
        """What the pools may grow to."""
        started = cls.of(config)
        return cls(
            prefill=max(started.prefill, config.prefill_max_replicas or 0),
            decode=max(started.decode, config.max_replicas or 0),
        )

    @classmethod
    def parse(cls, topology: str) -> Self:
        """Reads `disagg_topo`.

        Raises:
            ValueError: it is not two positive numbers, or they are absurd.
        """
        numbers = [part.strip() for part in topology.split(",")]
        if len(numbers) != 2 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
            raise ValueError(f"disagg_topo={topology!r}: give prefill and decode replicas as P,D, for example 1,2")
        prefill, decode = map(int, numbers)
        if max(prefill, decode) > LARGEST:
            raise ValueError(f"disagg_topo={topology!r}: a pool has at most {LARGEST} replicas")
        return cls(prefill=prefill, decode=decode)


def check_pools(config: EngineConfig) -> None:
    """Checks the options about pools.

    Raises:
        ValueError: they don't go together, or the prefill pool can't be as they say.
    """
    if config.disagg_topo is None:
        return
    Pools.parse(config.disagg_topo)
    if config.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} with disagg_topo={config.disagg_topo}: disagg_topo says "
            "how many replicas there are; leave data_parallel_size out"
        )
    if any(getattr(config, name) is not None for name in PREFILL_OVERRIDES):
        type(config)(**prefill_config(config).model_dump())  # its options must go together, too


def prefill_config(config: EngineConfig) -> EngineConfig:
    """The options of a prefill replica. Those about pools stay: it is still a part of them."""
    own = {name: getattr(config, name) for name in PREFILL_OVERRIDES}
    values = {PREFILL_OVERRIDES[name]: value for name, value in own.items() if value is not None}
    if values.get("num_hosts") == 1:
        values.setdefault("topology", None)  # a single host has none to name
    return config.model_copy(update={**dict.fromkeys(own), **values})
