"""From logits to tokens: penalties and cuts, the draw, and log-probabilities, each only in steps where a row wants it.

Logits are cut over the chips by vocabulary. Greedy steps compare each chip's best. Otherwise the rows are dealt out:
every chip has whole rows of a share of them, and the code for one chip does the rest. No chip ever sees all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from backends.jax.collectives import Collectives
from backends.jax.logits import LOGPROB_COLUMNS, RowParams, logprobs, rewrite_logits
from backends.jax.sampling import Sampler
from backends.jax.slots import SlotTables

ROWS_AT_ONCE = 32

Choose = Callable[[jax.Array, RowParams, jax.Array], tuple[jax.Array, jax.Array]]
"""(logits [R, vocab], rows, num_rows [1]) -> chosen ids [R], packed log-probabilities [R, LOGPROB_COLUMNS]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What some row of the step asks for; bool scalars."""

    rewrites: jax.Array
    draws: jax.Array
    logprobs: jax.Array


@dataclass(frozen=True, kw_only=True)
class TokenSelector:
    sampler: Sampler
    vocab_size: int
    one_pass: bool = False
    """For the native sampler, which is quick with greedy rows and keeps nothing but its results: no other path."""

    def __call__(
        self,
        logits: jax.Array,
        history: jax.Array,
        tables: SlotTables,
        rows: RowParams,
        wanted: Wanted,
        num_rows: jax.Array,
        collectives: Collectives,
    ) -> tuple[jax.Array, jax.Array]:
        """Chooses from logits [R, vocab_per_chip].

        Returns:
            Chosen ids [R] int32, and packed log-probabilities [R, LOGPROB_COLUMNS], zeros if nobody wants them.
        """
        choose = partial(self._choose, history, tables, wanted)
        if self.one_pass and collectives.chips == 1:
            return choose(logits, rows, num_rows)
        total = logits.shape[0]

        def dealt_out() -> tuple[jax.Array, jax.Array]:
            share = collectives.whole_rows(logits)
            own = collectives.own_rows(rows)
            valid = collectives.local_rows(num_rows, share.shape[0])
            chosen, packed = choose(share, own, valid) if self.one_pass else _in_groups(choose, share, own, valid)
            nothing = no_logprobs(total)
            packed = jax.lax.cond(wanted.logprobs, lambda: collectives.gather_rows(packed)[:total], lambda: nothing)
            return collectives.gather_rows(chosen)[:total], packed

        def greedy() -> tuple[jax.Array, jax.Array]:
            return collectives.greedy(logits, self.vocab_size), no_logprobs(total)

        chosen, packed = jax.lax.cond(wanted.rewrites | wanted.draws | wanted.logprobs, dealt_out, greedy)
        return chosen, packed

    def _choose(
        self,
        history: jax.Array,
        tables: SlotTables,
        wanted: Wanted,
        logits: jax.Array,
        rows: RowParams,
        num_rows: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The same for logits of the whole vocabulary, and padding behind."""
        logits = logits[:, : self.vocab_size]
        final = jax.lax.cond(wanted.rewrites, lambda: rewrite_logits(logits, history, tables, rows), lambda: logits)
        chosen = self.sampler(final, rows, num_rows)
        packed = jax.lax.cond(wanted.logprobs, lambda: logprobs(logits, chosen), lambda: no_logprobs(logits.shape[0]))
        return chosen, packed

    def prompt_logprobs(self, logits: jax.Array, targets: jax.Array, collectives: Collectives) -> jax.Array:
        """Packed log-probabilities [n, LOGPROB_COLUMNS] of targets [n] from logits [n, vocab_per_chip]."""
        whole = collectives.whole_rows(logits)[:, : self.vocab_size]
        packed = logprobs(whole, collectives.own_rows(targets))
        return collectives.gather_rows(packed)[: targets.shape[0]]


def no_logprobs(rows: int) -> jax.Array:
    return jnp.zeros((rows, LOGPROB_COLUMNS), jnp.int32)


def _in_groups(choose: Choose, logits: jax.Array, rows: RowParams, num_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chooses for a few rows at one time, because choosing takes several times the memory of the logits."""
    total = logits.shape[0]
    size = min(total, ROWS_AT_ONCE)
    if size == total:
        return choose(logits, rows, num_rows)

    def one_group(number: jax.Array, chosen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = jnp.minimum(number * size, total - size)  # the last one overlaps the one before

        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        new = choose(part(logits), jax.tree.map(part, rows), jnp.clip(num_rows - start, 0, size))
        ids, packed = (jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(chosen, new, strict=True))
        return ids, packed

    nothing = (jnp.zeros(total, jnp.int32), no_logprobs(total))
    ids, packed = jax.lax.fori_loop(0, -(-total // size), one_group, nothing)
    return ids, packed
