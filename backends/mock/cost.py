"""How long the mock backend's steps take. A simulation reads this without running the backend."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import StepBatch
from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MockCost:
    """A constant per step, and a time for each token of prefill."""

    step_ms: float
    prefill_ms_per_token: float

    @classmethod
    def of(cls, config: EngineConfig) -> MockCost:
        return cls(step_ms=config.mock_step_ms, prefill_ms_per_token=config.mock_prefill_ms_per_token)

    def decode_s(self, num_rows: int, kv_tokens: int) -> float:  # noqa: ARG002
        """The same for a step that only decodes, whose requests have so many tokens in the KV cache together."""
        return self.step_ms / 1000

    def step_s(self, batch: StepBatch) -> float:
        """Seconds that the device works on a step."""
        if batch.is_decode_only:
            return self.decode_s(batch.num_rows, 0)
        prefill_tokens = int(batch.query_lens[batch.query_lens > 1].sum())
        return (self.step_ms + self.prefill_ms_per_token * prefill_tokens) / 1000
