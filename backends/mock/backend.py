"""MockBackend: implements the backend interface over MockDevice, with simulated time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from backends.mock.checks import BatchChecker
from backends.mock.cost import MockCost
from backends.mock.device import MockDevice
from backends.mock.kv_exchange import MockBlocks, entries_of, format_of
from engine.backend import Backend, BackendError, BackendInfo, Capabilities, PendingStep, Progress, no_progress
from engine.batch import Int32, LogprobArrays, StepBatch, StepResult
from engine.config import EngineConfig
from engine.kv_blocks import KVFormat, KVPayload, PendingBlocks
from engine.request import MAX_TOP_LOGPROBS

_KV_TOKENS = 262_144  # size of the cache when num_blocks is not given
_MAX_MODEL_LEN = 8192
_STEP_TOKENS = 2048


class MockBackend(Backend):
    """Answers every prompt with tokens that `mock_tokens(prompt, …)` gives, at the speed the config asks for.

    There are no logits: a request's seed (with temperature > 0) and min_tokens count, and other sampling parameters
    don't change the text. Log probabilities are made up, of the right shape and order.

    Args:
        check: verify every batch against the rules of engine/batch.py, and the KV of every row (slow).
        vocab_size: 49152 is SmolLM2's, whose tokenizer is the default one.
        eos_every: about one of so many tokens is the end-of-sequence token; 0: never.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        check: bool = False,
        vocab_size: int = 49152,
        eos_token_id: int = 2,
        eos_every: int = 0,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._config = config
        self._cost = MockCost.of(config)
        self._check = check
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._eos_every = eos_every
        self._capabilities = capabilities or Capabilities(kv_exchange=True)
        self._device: MockDevice | None = None
        self._checker: BatchChecker | None = None
        self._busy_until = 0.0  # monotonic time when the device is done with all dispatched steps

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        config = self._config
        progress("allocating KV blocks", 0, 1)
        max_model_len = config.max_model_len or _MAX_MODEL_LEN
        num_blocks = config.num_blocks or max(_KV_TOKENS, 4 * max_model_len) // config.block_size
        step_tokens = config.max_num_batched_tokens or max(_STEP_TOKENS, config.max_decode_seqs)
        info = BackendInfo(
            device="mock",
            vocab_size=self._vocab_size,
            eos_token_ids=(self._eos_token_id,),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=config.block_size,
            bytes_per_block=config.mock_kv_bytes_per_token * config.block_size,
            max_step_tokens=step_tokens,
            max_step_rows=config.max_decode_seqs,
            max_prefill_rows=config.max_prefill_seqs or config.max_decode_seqs,
            capabilities=self._capabilities,
        )
        self._device = MockDevice(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_slots=info.max_step_rows,
            max_len=max_model_len,
            eos_token_id=self._eos_token_id,
            eos_every=self._eos_every,
        )
        self._checker = BatchChecker(info) if self._check else None
        progress("allocating KV blocks", 1, 1, f"{num_blocks} blocks of {config.block_size} tokens")
        return info

    def warmup(self, progress: Progress = no_progress) -> None:
        progress("compiling", 1, 1, "nothing to compile")

    def dispatch(self, batch: StepBatch) -> PendingStep:
        device = self._ready
        tokens = device.token_ids(batch)
        if self._checker is not None:
            self._checker.check(batch, tokens, device)
        for state in batch.slot_states:
            device.history[state.slot, : len(state.token_ids)] = state.token_ids
        sampled = device.run(batch, tokens)
        self._busy_until = max(self._busy_until, time.monotonic()) + self._cost.step_s(batch)
        result = StepResult(
            step=batch.step,
            token_ids=sampled,
            logprobs=_logprobs(sampled, self._vocab_size) if (batch.sampling.num_logprobs >= 0).any() else None,
            prompt_logprobs=_logprobs(batch.target_ids, self._vocab_size) if batch.prompt_logprobs.any() else None,
        )
        return _MockStep(result, self._busy_until)

    def kv_format(self) -> KVFormat:
        return format_of(self._config.mock_kv_bytes_per_token)

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:
        entries = self._ready.kv[list(block_ids)].reshape(-1)[offset : offset + num_tokens]
        return MockBlocks(entries, self.kv_format(), self._busy_until)

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        entries = entries_of(payload, self.kv_format())
        places = np.arange(offset, offset + len(entries))
        blocks, offsets = np.array(block_ids)[places // self._config.block_size], places % self._config.block_size
        self._ready.kv[blocks, offsets] = entries
        if self._checker is not None:
            self._checker.imported(blocks, offsets)

    def close(self) -> None:
        """There is nothing to free."""

    @property
    def _ready(self) -> MockDevice:
        if self._device is None:
            raise BackendError("the mock backend is not loaded: call load() first")
        return self._device


class _MockStep(PendingStep):
    def __init__(self, result: StepResult, done_at: float) -> None:
        self._result = result
        self._done_at = done_at

    def result(self) -> StepResult:
        wait_s = self._done_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return self._result


def _logprobs(token_ids: Int32, vocab_size: int) -> LogprobArrays:
    """The token itself is the likeliest, with probability one half; the next ids follow with halves of the rest."""
    alternatives = np.arange(MAX_TOP_LOGPROBS, dtype=np.int32)
    halves = np.broadcast_to(-np.log(2.0) * (alternatives + 1), (len(token_ids), MAX_TOP_LOGPROBS))
    return LogprobArrays(
        chosen=np.full(len(token_ids), -np.log(2.0), np.float32),
        top_ids=(token_ids[:, None] + alternatives) % np.int32(vocab_size),
        top_logprobs=halves.astype(np.float32),
    )
