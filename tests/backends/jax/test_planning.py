"""Buckets and memory: few programs that fit every step, and refusals before anything large is read."""

from __future__ import annotations

from typing import Any

import pytest

from backends.jax.buckets import MAX_PROGRAMS, Buckets
from backends.jax.memory import plan_kv_cache
from engine.backend import BackendError
from engine.config import GIB, EngineConfig


def buckets(max_model_len: int = 8192, pads_tables: bool = False, **options: Any) -> Buckets:
    config = EngineConfig.from_args(options)
    return Buckets(
        config,
        max_tokens=config.max_num_batched_tokens or 256,
        max_rows=config.max_decode_seqs,
        block_size=config.block_size,
        max_model_len=max_model_len,
        pads_tables=pads_tables,
    )


@pytest.mark.parametrize("pads_tables", [False, True])
@pytest.mark.parametrize("max_model_len", [100, 8192, 131072])
@pytest.mark.parametrize("max_decode_seqs", [1, 5, 64, 256])
def test_a_default_deployment_has_few_programs_and_one_for_every_step(
    pads_tables: bool, max_model_len: int, max_decode_seqs: int
) -> None:
    some = buckets(max_model_len, pads_tables, max_decode_seqs=max_decode_seqs)
    assert len(some.shapes) <= MAX_PROGRAMS
    blocks = -(-max_model_len // 32)
    assert max(s.blocks for s in some.shapes) == blocks
    assert max(s.rows for s in some.shapes if s.decode_only) == max_decode_seqs
    assert max(s.rows for s in some.shapes if not s.decode_only) == min(256, max_decode_seqs)
    assert max(s.tokens for s in some.shapes) >= 256


def test_options_that_ask_for_too_many_programs_are_refused() -> None:
    with pytest.raises(BackendError, match="raise decode_seqs_padding or prefill_len_padding"):
        buckets(max_num_batched_tokens=16384, prefill_len_padding=16, max_decode_seqs=2048, prefill_seqs_padding=1)


def plan(**options: Any) -> Any:
    sizes = {
        "weight_bytes": 2 * GIB,
        "other_bytes": 1 << 20,
        "bytes_per_block": 1 << 20,
        "model_max_len": 4096,
        "device_bytes": 8 * GIB,
        "kv_limit": 2 * GIB,
    }
    sizes.update({key: options.pop(key) for key in tuple(options) if key in sizes})
    return plan_kv_cache(EngineConfig.from_args(options), max_rows=64, **sizes)


def test_without_options_the_kv_cache_stops_at_its_limit() -> None:
    assert plan().num_blocks == 2048


def test_asked_for_memory_is_used_whole() -> None:
    assert 5000 < plan(device_memory_gib=8).num_blocks < 5325  # 0.9 * 8 - 2 GiB in blocks of 1 MiB


def test_a_default_context_shrinks_to_what_fits() -> None:
    assert plan(bytes_per_block=GIB).max_model_len == 64  # two blocks of 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, "max_model_len=5000 is more than the model's 4096 positions"),
        ({"weight_bytes": 8 * GIB}, "the weights take 8.00 GiB of the budget of 7.20 GiB"),
        ({"num_blocks": 9000}, "num_blocks=9000 takes 8.79 GiB"),
        ({"num_blocks": 4, "max_model_len": 200}, "lower max_model_len or raise num_blocks"),
        ({"bytes_per_block": GIB, "max_model_len": 4096}, "lower max_model_len or raise device_memory_gib"),
    ],
)
def test_what_does_not_fit_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        plan(**options)
