"""What a step moves and computes per device, by formula: the least that any program for it must do.

A lower bound on purpose: activations stay on the chip, weights and keys are read once, collectives send what an optimal
algorithm sends. Compiled programs do more; `compiled` says how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from cluster.plan.sizing import ITEM_BYTES, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Work of one step, per device."""

    hbm_bytes: float
    flops: float
    ici_bytes: float  # sent
    collectives: float  # number of them

    def __add__(self, other: Self) -> StepCost:
        return StepCost(
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
            flops=self.flops + other.flops,
            ici_bytes=self.ici_bytes + other.ici_bytes,
            collectives=self.collectives + other.collectives,
        )

    def __mul__(self, times: float) -> StepCost:
        return StepCost(
            hbm_bytes=self.hbm_bytes * times,
            flops=self.flops * times,
            ici_bytes=self.ici_bytes * times,
            collectives=self.collectives * times,
        )


class StepCosts(Protocol):
    """Where costs come from: formulas or compiled programs."""

    def decode(self, rows: float, context: float) -> StepCost:
        """A step of `rows` sequences, one token each, with `context` tokens of keys on average."""
        ...

    def prefill(self, tokens: float, context: float) -> StepCost:
        """What `tokens` of one prompt, of which each sees `context` keys on average, add to a step without weights."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCosts:
    """StepCosts by formula."""

    shard: Shard
    devices_per_chip: int = 1

    def decode(self, rows: float, context: float) -> StepCost:
        shard = self.shard
        seen = self._seen(context)
        embedding = rows * shard.config.hidden_size * ITEM_BYTES
        return StepCost(
            hbm_bytes=self.weight_reads + embedding + rows * (seen + 1) * shard.kv_bytes_per_token,
            flops=rows * (2 * (shard.layer_parameters + shard.head_parameters) + self._attention_flops(seen)),
            ici_bytes=self._all_reduced(rows),
            collectives=self._num_collectives,
        )

    def prefill(self, tokens: float, context: float) -> StepCost:
        shard = self.shard
        seen = self._seen(context)
        # Keys of earlier tokens are read once a chunk and not once a token: left out, as the bound wants it.
        return StepCost(
            hbm_bytes=tokens * (shard.kv_bytes_per_token + shard.config.hidden_size * ITEM_BYTES),
            flops=tokens * (2 * shard.layer_parameters + self._attention_flops(seen)) + 2 * shard.head_parameters,
            ici_bytes=self._all_reduced(tokens),
            collectives=0,  # they join those of the step
        )

    @property
    def weight_reads(self) -> float:
        """Bytes of weights that every step reads: all of them but the table that is only looked up."""
        return self.shard.layer_bytes + self.shard.head_bytes

    def _seen(self, context: float) -> float:
        window = self.shard.config.sliding_window
        return context if window is None else min(context, window)

    def _attention_flops(self, seen: float) -> float:
        config = self.shard.config
        return 4 * seen * self.shard.query_heads * config.head_dim * config.num_layers

    @property
    def _num_collectives(self) -> int:
        """Two sums a layer, the embedding's, and the exchange of the largest logits."""
        return 0 if self.shard.tensor_parallel == 1 else 2 * self.shard.config.num_layers + 2

    def _all_reduced(self, tokens: float) -> float:
        """Sent for the step's sums over the group."""
        shard = self.shard
        each = tokens * shard.config.hidden_size * ITEM_BYTES
        return (2 * shard.config.num_layers + 1) * sent_bytes(
            "all-reduce", each, shard.tensor_parallel, self.devices_per_chip
        )


def sent_bytes(kind: str, size: float, devices: int, devices_per_chip: int = 1) -> float:
    """What each device of a group sends over the links in one collective, by the best algorithm.

    The devices of one chip settle among themselves first, and share what the chip sends.

    Args:
        kind: HLO's name.
        size: bytes of a device's operand; of an all-gather its result.
    """
    chips = -(-devices // devices_per_chip)
    others = size * (chips - 1) / chips / min(devices, devices_per_chip)
    if kind == "collective-permute":
        return size if chips > 1 else 0.0
    return 2 * others if kind == "all-reduce" else others
