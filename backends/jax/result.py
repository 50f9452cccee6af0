"""DispatchedStep: a step on its way, whose packed result is unpacked when the engine asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from engine.backend import BackendError, PendingStep
from engine.batch import LogprobArrays, StepBatch, StepResult
from engine.request import MAX_TOP_LOGPROBS


@dataclass(slots=True)
class DispatchedStep(PendingStep):
    batch: StepBatch
    packed: jax.Array
    prompt: jax.Array | None
    wants_logprobs: bool

    def result(self) -> StepResult:
        rows, tokens = self.batch.num_rows, self.batch.num_tokens
        try:
            packed = np.asarray(self.packed)[:rows]
            prompt = None if self.prompt is None else _unpack(np.asarray(self.prompt)[:tokens])
        except jax.errors.JaxRuntimeError as error:
            raise BackendError(f"step {self.batch.step} failed on the device: {str(error).splitlines()[0]}") from error
        return StepResult(
            step=self.batch.step,
            token_ids=packed[:, 0],
            logprobs=_unpack(packed[:, 1:]) if self.wants_logprobs else None,
            prompt_logprobs=prompt,
        )


def _unpack(packed: NDArray[np.int32]) -> LogprobArrays:
    """What logits.logprobs packed."""
    ids_end = 1 + MAX_TOP_LOGPROBS
    as_float = np.ascontiguousarray(packed).view(np.float32)
    return LogprobArrays(chosen=as_float[:, 0], top_ids=packed[:, 1:ids_end], top_logprobs=as_float[:, ids_end:])
