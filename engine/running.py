"""RequestState: everything the engine keeps about one request between its submission and its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum, auto

import numpy as np

from engine.batch import Int32
from engine.kv_cache import block_hashes, request_root
from engine.metrics import RequestRecord
from engine.request import EngineRequest, FinishReason, TokenLogprobs


class Status(Enum):
    WAITING = auto()  # no place in the batch yet, or preempted
    IMPORTING = auto()  # its KV comes from elsewhere: it owns blocks, and no slot yet
    PREFILLING = auto()  # some known tokens are not computed yet
    DECODING = auto()  # one token per step
    DRAINING = auto()  # its last step is dispatched and not read yet
    FINISHED = auto()


class RequestState:
    """One request. `token_ids` holds every token the host knows; what the device has computed of them is in the
    SlotTable while the request has a slot (`slot >= 0`)."""

    __slots__ = (
        "_block_hashes",
        "_min_len",
        "_root_hash",
        "admission_time",
        "arrival_time",
        "block_ids",
        "deadline",
        "first_token_time",
        "last_step",
        "last_token_time",
        "max_len",
        "num_cached_tokens",
        "num_exported_tokens",
        "num_registered_blocks",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "request_id",
        "slot",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.status = Status.WAITING
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.prompt_len = len(request.prompt_token_ids)
        self.max_len = min(self.prompt_len + sampling.max_tokens, max_model_len)
        self.stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
        self.slot = -1
        self.block_ids: list[int] = []
        self.num_registered_blocks = 0
        self.last_step = -1  # the last step it had a row in, kept here while it has no slot
        self.num_cached_tokens = 0
        self.num_exported_tokens = request.export_from or 0  # up to where its KV has been handed out
        self.arrival_time = min(request.arrival_time, clock())
        self.deadline = math.inf  # monotonic seconds
        self.admission_time = 0.0  # its first place in the batch; 0 before
        self.first_token_time = 0.0  # 0 before
        self.last_token_time = 0.0  # 0 before the first one
        # One entry per prompt token while they are collected; None when not asked for or already delivered.
        asked = sampling.prompt_logprobs is not None and not request.output_token_ids
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] * self.prompt_len if asked else None
        self._min_len = self.prompt_len + sampling.min_tokens
        self._root_hash = request_root(request)
        self._block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def last_kv_len(self) -> int:
        """Tokens in the KV cache after the request's last step: its final token is never computed."""
        return max(self.max_len - 1, self.prompt_len)

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` blocks, all of whose tokens are known."""
        hashes = self._block_hashes
        if len(hashes) < count:
            new = self.token_ids[len(hashes) * block_size : count * block_size]
            hashes.extend(block_hashes(hashes[-1] if hashes else self._root_hash, new, block_size))
        return hashes[:count]

    def record(self) -> RequestRecord:
        """For the metrics."""
        return RequestRecord(
            prompt_tokens=self.prompt_len,
            generated_tokens=self.num_tokens - self.prompt_len - len(self.request.output_token_ids),
            arrival_time=self.arrival_time,
            admission_time=self.admission_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
        )

    def known_tokens(self) -> Int32:
        return np.array(self.token_ids, dtype=np.int32)

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a sampled token; says whether the request ends with it, and why."""
        tokens = self.token_ids
        tokens.append(token_id)
        if token_id in self.stop_ids and len(tokens) >= self._min_len:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.max_len else None

    def finished_before_start(self) -> FinishReason | None:
        """Whether a resubmitted request already has all its tokens."""
        if self.num_tokens == self.prompt_len:
            return None
        if self.token_ids[-1] in self.stop_ids and self.num_tokens >= self._min_len:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_len else None
