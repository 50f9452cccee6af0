"""Whole models on slices, compiled for the chips that would run them (`make test-tpu-compile`): docs/tpu.md's table.

The file's name keeps it out of `make test`.
"""

from __future__ import annotations

import pytest

from backends.jax.buckets import MAX_PROGRAMS
from bench.compile_matrix import CASES, CONTEXT, ROWS, Case, prove


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_deployment_fits_and_decodes_near_its_minimum(case: Case) -> None:
    proof = prove(case)
    assert proof.peak_bytes < proof.hbm_bytes
    assert proof.kv_tokens >= ROWS * CONTEXT
    assert proof.num_programs <= MAX_PROGRAMS
    assert 0 <= proof.over_minimum < 0.15
    assert proof.decode.temp_bytes < 0.02 * proof.hbm_bytes
    assert proof.prefill is not None
    for report in (proof.decode, proof.prefill):
        # All of the state stays in place; what a step returns beside it is small.
        assert report.output_bytes - report.alias_bytes < 1 << 20
        assert report.kernels == {"ragged_paged_attention": proof.num_layers}
