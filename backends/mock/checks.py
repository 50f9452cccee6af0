"""Checks of what the engine sends: every rule of engine/batch.py, and that the KV of each row is the row's own.

Slow by design; on in tests, off in serving.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backends.mock.device import MockDevice
from engine.backend import BackendError, BackendInfo
from engine.batch import FROM_DEVICE, Int32, StepBatch

_IMPORTED = -2
"""In place of a position: the entry came from elsewhere, and its token is known by what it adds to the one before."""


class BatchChecker:
    """Looks at every batch before the device runs it. Keeps its own copy of the tokens behind each KV entry."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info
        self._next_step = 0
        self._tokens = np.full((info.num_blocks, info.block_size), -1, np.int32)  # the token of each KV entry
        self._positions = np.full((info.num_blocks, info.block_size), -1, np.int32)

    def imported(self, blocks: NDArray[np.intp], offsets: NDArray[np.intp]) -> None:
        """KV entries were written that no step has computed."""
        self._tokens[blocks, offsets] = -1
        self._positions[blocks, offsets] = _IMPORTED

    def check(self, batch: StepBatch, tokens: Int32, device: MockDevice) -> None:
        """Raises BackendError if the batch breaks a rule. `tokens` is the batch's input with FROM_DEVICE replaced."""
        self._check_shapes(batch)
        self._check_limits(batch)
        ends = np.cumsum(batch.query_lens)
        written: dict[int, int] = {}
        read: dict[int, int] = {}
        for row in range(batch.num_rows):
            flat = slice(int(ends[row] - batch.query_lens[row]), int(ends[row]))
            self._check_row(batch, row, flat, tokens, device)
            self._claim_blocks(batch, row, written, read)
        for row in range(batch.num_rows):
            flat = slice(int(ends[row] - batch.query_lens[row]), int(ends[row]))
            self._write(batch, row, tokens[flat], batch.positions[flat])

    def _require(self, condition: bool, batch: StepBatch, problem: str) -> None:
        if not condition:
            raise BackendError(f"mock backend, step {batch.step}: {problem}")

    def _check_shapes(self, batch: StepBatch) -> None:
        rows, tokens = batch.num_rows, batch.num_tokens
        self._require(batch.step == self._next_step, batch, f"expected step {self._next_step}")
        self._next_step += 1
        per_row = (batch.kv_lens, batch.slots, batch.samples, batch.prompt_logprobs, batch.block_tables)
        self._require(all(len(array) == rows for array in per_row), batch, "per-row arrays differ in length")
        sampling = batch.sampling
        arrays = [getattr(sampling, name) for name in type(sampling).__slots__]
        self._require(all(len(array) == rows for array in arrays), batch, "sampling arrays differ in length")
        self._require(int(batch.query_lens.sum()) == tokens, batch, "query lengths don't add up to the tokens")
        self._require(len(batch.positions) == len(batch.target_ids) == tokens, batch, "token arrays differ in length")
        self._require(bool((batch.query_lens >= 1).all()), batch, "a row without tokens")
        self._require(len(set(batch.slots.tolist())) == rows, batch, "a slot has two rows")

    def _check_limits(self, batch: StepBatch) -> None:
        info = self._info
        self._require(batch.num_tokens <= info.max_step_tokens, batch, "more tokens than max_step_tokens")
        self._require(batch.num_rows <= info.max_step_rows, batch, "more rows than max_step_rows")
        prefill_rows = int((batch.query_lens > 1).sum())
        self._require(prefill_rows <= info.max_prefill_rows, batch, "more prefill rows than max_prefill_rows")
        self._require(bool((batch.slots < info.max_step_rows).all()), batch, "a slot beyond max_step_rows")
        first_prefill = np.flatnonzero(batch.query_lens > 1)
        if len(first_prefill):
            from_device = batch.token_ids[int(batch.query_lens[: first_prefill[0]].sum()) :] == FROM_DEVICE
            self._require(not from_device.any(), batch, "a decode row behind a prefill row")

    def _check_row(self, batch: StepBatch, row: int, flat: slice, tokens: Int32, device: MockDevice) -> None:
        kv_len, query_len, size = int(batch.kv_lens[row]), int(batch.query_lens[row]), self._info.block_size
        positions = np.arange(kv_len - query_len, kv_len)
        self._require(np.array_equal(batch.positions[flat], positions), batch, f"row {row}: positions not consecutive")
        self._require(kv_len <= self._info.max_model_len, batch, f"row {row}: longer than max_model_len")
        self._require(bool((tokens[flat] >= 0).all()), batch, f"row {row}: FROM_DEVICE, but nothing was sampled")
        self._require(bool((tokens[flat] < self._info.vocab_size).all()), batch, f"row {row}: token not in vocabulary")
        num_blocks = -(-kv_len // size)
        table = batch.block_tables[row]
        self._require(len(table) >= num_blocks, batch, f"row {row}: block table too short")
        self._require(not table[num_blocks:].any(), batch, f"row {row}: block table not 0 behind its blocks")
        blocks = table[:num_blocks].tolist()
        self._require(len(set(blocks)) == num_blocks, batch, f"row {row}: a block twice in its table")
        self._require(all(0 <= b < self._info.num_blocks for b in blocks), batch, f"row {row}: no such block")
        self._check_context(batch, row, table[:num_blocks], kv_len - query_len, device)

    def _check_context(self, batch: StepBatch, row: int, blocks: Int32, length: int, device: MockDevice) -> None:
        """The KV of the tokens before the row's queries is complete and of one sequence."""
        self._recognize(batch, row, blocks, length, device)
        positions = self._positions[blocks].reshape(-1)[:length]
        self._require(np.array_equal(positions, np.arange(length)), batch, f"row {row}: KV missing or of another row")
        tokens = self._tokens[blocks].reshape(-1)[:length]
        expected = device.entries_of(tokens)
        entries = device.kv[blocks].reshape(-1)[:length]
        self._require(np.array_equal(entries, expected), batch, f"row {row}: KV of different sequences in one table")

    def _recognize(self, batch: StepBatch, row: int, blocks: Int32, length: int, device: MockDevice) -> None:
        """Finds the tokens of imported entries, which are nonsense if entries are missing or mixed up."""
        size = self._info.block_size
        positions = np.flatnonzero(self._positions[blocks].reshape(-1)[:length] == _IMPORTED)
        if not len(positions):
            return
        tokens = device.tokens_of(device.kv[blocks].reshape(-1)[:length])[positions]
        self._require(bool((tokens < self._info.vocab_size).all()), batch, f"row {row}: imported KV is wrong")
        self._tokens[blocks[positions // size], positions % size] = tokens.astype(np.int32)
        self._positions[blocks[positions // size], positions % size] = positions

    def _claim_blocks(self, batch: StepBatch, row: int, written: dict[int, int], read: dict[int, int]) -> None:
        """No block is written by one row and touched by another in the same step."""
        kv_len, start = int(batch.kv_lens[row]), int(batch.kv_lens[row] - batch.query_lens[row])
        first_written = start // self._info.block_size
        for index, block in enumerate(batch.block_tables[row, : -(-kv_len // self._info.block_size)].tolist()):
            self._require(
                block not in written, batch, f"row {row}: block {block} is written by row {written.get(block)}"
            )
            if index >= first_written:
                self._require(block not in read, batch, f"row {row}: writes block {block} of row {read.get(block)}")
                written[block] = row
            else:
                read[block] = row

    def _write(self, batch: StepBatch, row: int, tokens: Int32, positions: Int32) -> None:
        blocks = batch.block_tables[row][positions // self._info.block_size]
        offsets = positions % self._info.block_size
        self._tokens[blocks, offsets] = tokens
        self._positions[blocks, offsets] = positions
