"""MockDevice: what the mock backend has instead of a model, a KV cache and a sampler.

The "KV" of a token is a hash of all tokens up to it: the sum over positions of (token + 1) * PRIME**position, modulo
2**64. A step reads the entry of the position before its first query token through the block table, adds its own tokens
and writes their entries; the next token is a mixing function of the last entry. So a single block that is lost, mixed
up, shared wrongly or read too early changes the rest of the text, just as it would with a model, while a step costs
a few numpy operations. Like a real device it keeps the sampled tokens of each slot, from which FROM_DEVICE is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import FROM_DEVICE, Int32, StepBatch

UInt64 = NDArray[np.uint64]

FIRST_TOKEN, NUM_TOKENS = 1000, 28000
"""Sampled ids lie in [FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS): ordinary words in common vocabularies."""

_PRIME = 0x9E3779B97F4A7C15  # odd, so that its powers never vanish modulo 2**64


def powers(count: int, base: int = _PRIME) -> UInt64:
    """base**0 .. base**(count-1) modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def mix(values: UInt64) -> UInt64:
    """SplitMix64's finalizer: every input bit changes half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample(contexts: UInt64, seeds: UInt64, *, eos_token_id: int, eos_every: int) -> Int32:
    """The token that follows each context. `seeds` is 0 for greedy rows; every `eos_every`-th token ends (0: none)."""
    values = mix(contexts + mix(seeds))
    tokens = (values % np.uint64(NUM_TOKENS)).astype(np.int32) + np.int32(FIRST_TOKEN)
    if eos_every:
        tokens[(values >> np.uint64(40)) % np.uint64(eos_every) == 0] = eos_token_id
    return tokens


def mock_tokens(
    prompt: Iterable[int],
    count: int,
    *,
    seed: int = 0,
    eos_token_id: int = 2,
    eos_every: int = 0,
    min_tokens: int = 0,
) -> list[int]:
    """The tokens that the mock backend answers a prompt with, computed by themselves (`seed` 0: greedy).

    An end-of-sequence token does not end the list.
    """
    tokens = list(prompt)
    start = len(tokens)
    weights = powers(start + count)
    context = np.zeros(1, np.uint64)
    context += ((np.array(tokens, np.uint64) + np.uint64(1)) * weights[:start]).sum(dtype=np.uint64)
    seeds = np.array([seed], np.uint64)
    while len(tokens) < start + count:
        token = int(sample(context, seeds, eos_token_id=eos_token_id, eos_every=eos_every)[0])
        if token == eos_token_id and len(tokens) - start < min_tokens:
            token = FIRST_TOKEN
        context += np.uint64(token + 1) * weights[len(tokens) : len(tokens) + 1]
        tokens.append(token)
    return tokens[start:]


class MockDevice:
    """State on the "device": KV entries per block, and the token history of every slot."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, max_len: int, eos_token_id: int, eos_every: int
    ) -> None:
        self.block_size = block_size
        self.kv: UInt64 = np.zeros((num_blocks, block_size), np.uint64)
        self.history: Int32 = np.full((num_slots, max_len + 1), -1, np.int32)
        self._powers = powers(max_len + 1)
        self._sampler: dict[str, Any] = {"eos_token_id": eos_token_id, "eos_every": eos_every}

    def token_ids(self, batch: StepBatch) -> Int32:
        """The batch's input tokens with FROM_DEVICE replaced by what this device sampled."""
        unknown = batch.token_ids == FROM_DEVICE
        if not unknown.any():
            return batch.token_ids
        slots = batch.slots if batch.is_decode_only else np.repeat(batch.slots, batch.query_lens)
        return np.where(unknown, self.history[slots, batch.positions], batch.token_ids)

    def run(self, batch: StepBatch, tokens: Int32) -> Int32:
        """Computes a step: writes its KV entries and samples. Returns [R] tokens, -1 where a row does not sample."""
        starts = batch.kv_lens - batch.query_lens
        contexts = np.where(starts > 0, self._read(batch, np.maximum(starts - 1, 0)), np.uint64(0))
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[batch.positions]
        if batch.is_decode_only:
            entries = contexts + terms
            row_of = np.arange(batch.num_rows)
            last = entries
        else:
            row_of = np.repeat(np.arange(batch.num_rows), batch.query_lens)
            ends = np.cumsum(batch.query_lens)
            sums = np.cumsum(terms, dtype=np.uint64)
            before = sums[ends - batch.query_lens] - terms[ends - batch.query_lens]  # sum of the rows before
            entries = sums + (contexts - before)[row_of]
            last = entries[ends - 1]
        blocks = batch.block_tables[row_of, batch.positions // self.block_size]
        self.kv[blocks, batch.positions % self.block_size] = entries
        return self._sample(batch, last)

    def entries_of(self, tokens: Int32) -> UInt64:
        """The KV entries that a sequence's tokens should have."""
        return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)], dtype=np.uint64)

    def tokens_of(self, entries: UInt64) -> UInt64:
        """The tokens of a sequence's KV entries; huge numbers where these are not one sequence's."""
        added = np.diff(entries, prepend=np.uint64(0))
        return added * powers(len(entries), pow(_PRIME, -1, 2**64)) - np.uint64(1)

    def _read(self, batch: StepBatch, positions: Int32) -> UInt64:
        """KV entry of one position per row."""
        blocks = batch.block_tables[np.arange(batch.num_rows), positions // self.block_size]
        entries: UInt64 = self.kv[blocks, positions % self.block_size]
        return entries

    def _sample(self, batch: StepBatch, contexts: UInt64) -> Int32:
        words = batch.sampling.seed.astype(np.uint64)
        seeds = np.where(batch.sampling.temperature > 0, words[:, 0] << np.uint64(32) | words[:, 1], np.uint64(0))
        tokens = sample(contexts, seeds, **self._sampler)
        too_early = batch.sampling.rewrites_logits & (batch.kv_lens < batch.sampling.min_len)
        tokens[too_early & (tokens == self._sampler["eos_token_id"])] = FIRST_TOKEN
        if batch.samples.all():
            self.history[batch.slots, batch.kv_lens] = tokens
            return tokens
        self.history[batch.slots[batch.samples], batch.kv_lens[batch.samples]] = tokens[batch.samples]
        return np.where(batch.samples, tokens, np.int32(-1))
