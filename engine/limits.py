"""Limits: what the scheduler may do, being the stricter of what is configured and what the backend can."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.backend import BackendInfo
from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    step_tokens: int  # tokens in one step
    running: int  # requests with a place in the batch
    live: int  # running and waiting together
    prefill_rows: int  # prefilling requests in one step
    chunked: bool  # prompts may be split
    mixed: bool  # prefill and decode rows may share a step
    caching: bool

    @classmethod
    def of(cls, config: EngineConfig, info: BackendInfo) -> Limits:
        step_tokens = min(info.max_step_tokens, config.max_num_batched_tokens or info.max_step_tokens)
        running = min(config.max_decode_seqs, info.max_step_rows, step_tokens)
        chunked = config.enable_chunked_prefill and info.capabilities.chunked_prefill
        return cls(
            step_tokens=step_tokens,
            running=running,
            live=running + config.max_queued_requests,
            prefill_rows=min(config.max_prefill_seqs or info.max_prefill_rows, info.max_prefill_rows),
            chunked=chunked,
            mixed=chunked and info.capabilities.mixed_batches,
            caching=config.enable_prefix_cache_hbm and info.capabilities.prefix_caching,
        )

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt where it must fit one step; None where it may be split."""
        return None if self.chunked else self.step_tokens


def usable(info: BackendInfo, limits: Limits) -> BackendInfo:
    """`info` with the `max_model_len` that the KV cache and the step size really allow."""
    longest = info.num_blocks * info.block_size + 1  # a sequence's last token is sampled and never cached
    if not info.capabilities.chunked_prefill:
        longest = min(longest, limits.step_tokens)  # a preempted request must be recomputed in one step
    return replace(info, max_model_len=min(longest, info.max_model_len))
