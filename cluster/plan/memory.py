"""What lies in a device's memory, what is left for keys and values, and how far the options can be turned up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.jax.memory import bytes_for_blocks, useful_blocks
from cluster.plan.workload import Workload

RESERVE = 0.01
"""Of a device's memory: programs and fragmentation, which nothing here counts."""
MAX_ROWS = 4096
_ROW_STEP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """One device's memory. Bytes, unless the name says otherwise."""

    usable_bytes: int
    budget_bytes: int  # hbm_utilization_factor of the usable memory
    weight_bytes: int
    other_bytes: int  # token history and sampling tables
    temporary_bytes: int  # of the program that needs most
    kv_bytes_per_block: int
    block_size: int  # tokens
    num_blocks: int
    max_model_len: int  # tokens

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.kv_bytes_per_block

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache of one tensor-parallel group, in tokens."""
        return self.num_blocks * self.block_size

    @property
    def kv_sequences(self) -> int:
        """Sequences of max_model_len that fit at one time."""
        return self.num_blocks // self.blocks_of(self.max_model_len)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def safe_factor(self) -> float:
        """The largest hbm_utilization_factor, in hundredths, that leaves room for temporaries and the reserve."""
        free = 1 - self.temporary_bytes / self.usable_bytes - RESERVE
        return max(0.0, math.floor(free * 100) / 100)

    @property
    def missing_bytes(self) -> int:
        """What this plan lacks for one sequence of max_model_len and its temporaries; 0 if it fits."""
        in_budget = self.weight_bytes + self.other_bytes
        in_budget += (self.blocks_of(self.max_model_len) + 1) * self.kv_bytes_per_block
        over_budget = in_budget - self.budget_bytes
        over_device = max(in_budget, self.budget_bytes) + self.temporary_bytes - self.usable_bytes
        return max(0, over_budget, over_device)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    def safe_rows(self, workload: Workload) -> int:
        """The largest max_running_seqs with room for every request's last token, so that nothing is preempted."""
        rows = min(MAX_ROWS, self.num_blocks // self.blocks_of(workload.tokens))
        return rows // _ROW_STEP * _ROW_STEP if rows >= _ROW_STEP else rows


def plan_memory(
    *,
    usable_bytes: int,
    factor: float,
    weight_bytes: int,
    other_bytes: int,
    temporary_bytes: int,
    kv_bytes_per_block: int,
    block_size: int,
    max_rows: int,
    max_model_len: int | None,
    model_max_len: int,
    shortest: int,
) -> MemoryPlan:
    """Gives the KV cache what the budget leaves, and not more than its rows can use.

    Args:
        max_model_len: None: the model's, or what the cache holds.
        shortest: tokens of the sequences that have to fit in any case.
    """
    budget = int(usable_bytes * factor)
    left = bytes_for_blocks(budget, weight_bytes + other_bytes, kv_bytes_per_block)
    most_useful = useful_blocks(max_rows, max_model_len or model_max_len, block_size)
    blocks = max(0, min(left // kv_bytes_per_block, most_useful))
    return MemoryPlan(
        usable_bytes=usable_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        other_bytes=other_bytes,
        temporary_bytes=temporary_bytes,
        kv_bytes_per_block=kv_bytes_per_block,
        block_size=block_size,
        num_blocks=blocks,
        max_model_len=max_model_len or max(shortest, min(model_max_len, blocks * block_size)),
    )
