"""The TPU attention kernel in interpret mode, which simulates a TPU's memories, DMAs and semaphores on CPU, against
attention by its definition in float64; and the other implementations against the same.

This is the short form: few programs, few steps. `make test-kernels` runs hundreds for each dtype (kernel_cases.py).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.backends.jax.kernel_cases import SHAPE, TOLERANCE, Case, check
from tests.backends.jax.ragged import steps

SHORT = {
    "bfloat16": Case(dtype="bfloat16", heads=4, kv_heads=2, head_dim=128, block_size=8, soft_cap=20.0),
    "float8_e4m3fn": Case(dtype="float8_e4m3fn", heads=4, kv_heads=4, head_dim=64, block_size=16, sinks=True),
}


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(step=steps(SHAPE))
def test_the_kernel_equals_its_definition(case: Case, step: st.DataObject) -> None:
    assert check(case, step) < TOLERANCE[case.dtype]
