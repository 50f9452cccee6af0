"""Which step shapes are compiled, and which one a batch takes. Few enough that a cold start stays short."""

from __future__ import annotations

from backends.jax.step import PROMPT_LOGPROB_TILE, StepShape
from engine.backend import BackendError
from engine.batch import StepBatch
from engine.config import EngineConfig

MAX_PROGRAMS = 40
"""More would make a cold start long; block-table widths are thinned out first."""


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, … and finally `last`, whatever it is."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return [*sizes, last]


def token_sizes(padding: int, last: int) -> list[int]:
    """Doubling up to `padding`, then multiples of it, enough to reach `last`; all multiples of PROMPT_LOGPROB_TILE."""
    unit = PROMPT_LOGPROB_TILE
    padding, last = round_up(padding, unit), round_up(last, unit)
    sizes = doubling(unit, min(padding, last))
    step = padding
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] + step, last))
        if len(sizes) % 4 == 0:
            step *= 2  # long prompts: padding grows with them, or the programs would be too many
    return sizes


def mixed_rows(padding: int, most: int) -> list[int]:
    """Few, some, or as many rows as there can be: padded rows cost less than padded tokens."""
    sizes = {min(padding, most), most}
    if most >= 8 * padding:
        sizes.add(4 * padding)
    return sorted(sizes)


class Buckets:
    """The step shapes of one deployment.

    Args:
        max_tokens: the step's token budget.
        max_rows: most rows of a step.
        block_size, max_model_len: in tokens.
        pads_tables: whether narrower block tables make steps cheaper (see PagedAttention).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_tokens: int,
        max_rows: int,
        block_size: int,
        max_model_len: int,
        pads_tables: bool,
    ) -> None:
        self._block_size = block_size
        max_blocks = round_up(max_model_len, block_size) // block_size
        widths = doubling(min(config.decode_blocks_padding, max_blocks), max_blocks) if pads_tables else [max_blocks]
        decode = [(r, r) for r in doubling(min(config.decode_seqs_padding, max_rows), max_rows)]
        mixed = [
            (tokens, rows)
            for tokens in token_sizes(config.prefill_len_padding, max_tokens)
            for rows in mixed_rows(config.prefill_seqs_padding, min(tokens, max_rows))
        ]
        while len(widths) > 1 and len(widths) * len(decode + mixed) > MAX_PROGRAMS:
            widths = widths[(len(widths) - 1) % 2 :: 2]  # every other one, and the widest
        if len(decode + mixed) > MAX_PROGRAMS:
            raise BackendError(
                f"these options ask for {len(decode + mixed)} compiled programs, more than {MAX_PROGRAMS}; "
                "raise decode_seqs_padding or prefill_len_padding, or lower max_decode_seqs or max_num_batched_tokens"
            )
        self._decode = [StepShape(tokens=t, rows=r, blocks=b, decode_only=True) for t, r in decode for b in widths]
        self._mixed = [StepShape(tokens=t, rows=r, blocks=b, decode_only=False) for t, r in mixed for b in widths]

    @property
    def shapes(self) -> list[StepShape]:
        return sorted({*self._decode, *self._mixed})

    def choose(self, batch: StepBatch) -> StepShape:
        """The smallest shape that the batch fits.

        Raises:
            ValueError: none does; the scheduler broke its limits.
        """
        tokens, rows = batch.num_tokens, batch.num_rows
        blocks = round_up(int(batch.kv_lens.max()), self._block_size) // self._block_size
        if batch.is_decode_only and not batch.prompt_logprobs.any():
            fitting = [s for s in self._decode if s.rows >= rows and s.blocks >= blocks]
        else:
            fitting = [s for s in self._mixed if s.tokens >= tokens and s.rows >= rows and s.blocks >= blocks]
        if not fitting:
            raise ValueError(f"no program for a step of {tokens} tokens, {rows} rows and {blocks} blocks a row")
        return min(fitting)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
