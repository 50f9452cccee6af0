"""The TPU attention kernel in interpret mode, which simulates a TPU's memories, DMAs and semaphores on CPU, against
attention by its definition in float64; and its second implementation, in XLA, against the same.

This is the short form: few programs, few steps. `make test-kernels` runs hundreds for each dtype (kernel_cases.py).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from backends.jax.attention import LibraryAttention, NativeAttention, PagedAttention, PallasAttention, XlaAttention
from backends.jax.attention.pallas.refs import KernelSpec, scratch_shapes
from backends.jax.attention.pallas.tiling import BlockSizes, block_sizes
from backends.jax.attention.pallas.words import WordLayout
from tests.backends.jax.kernel_cases import SHAPE, TOLERANCE, Case, check
from tests.backends.jax.ragged import DTYPES, LAYERS, Step, steps, worst_error
from tests.tpu_compile.attention import ROWS, abstract_arguments

SHORT = {
    "bfloat16": Case(dtype="bfloat16", heads=4, kv_heads=2, head_dim=128, block_size=8, soft_cap=20.0),
    "float8": Case(dtype="float8_e4m3fn", heads=3, kv_heads=1, head_dim=64, block_size=16, sinks=True),
}
FEW = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT)
@FEW
@given(step=steps(SHAPE))
def test_the_kernel_equals_the_definition_and_nothing_races(case: Case, step: Step) -> None:
    assert check(case, step) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(step=steps(SHAPE))
def test_xla_equals_the_definition(dtype: str, has_sinks: bool, step: Step) -> None:
    attention = XlaAttention(
        num_layers=LAYERS,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        block_size=8,
        window=None,
        dtype=dtype,
        soft_cap=5.0 if has_sinks else None,
    )
    assert worst_error(attention, step, SHAPE, has_sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim"), [("float32", 2, 96), ("bfloat16", 3, 64), ("int8", 1, 256), ("int8", 3, 64)]
)
def test_words_give_back_what_was_packed(dtype: str, kv_heads: int, head_dim: int) -> None:
    layout = WordLayout(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    drawn = np.random.default_rng(0).standard_normal((2, 3, kv_heads, head_dim)) * 30
    keys, values = jnp.asarray(drawn.astype(DTYPES[dtype]))
    words = layout.pack(keys, values)
    assert words.shape == (3, layout.word_rows, 1, 128)
    found = layout.unpack(words)
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(keys))
    np.testing.assert_array_equal(np.asarray(found[1]), np.asarray(values))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "kib"),
    [
        (32, 8, 128, "bfloat16", 4),  # no padding: 2 x 8 x 128 x 2 bytes a token and layer
        (8, 1, 128, "bfloat16", 0.5),
        (20, 5, 128, "bfloat16", 2.5),
        (32, 8, 64, "bfloat16", 2),
        (32, 32, 96, "bfloat16", 16),  # heads of 96 take 128 lanes
        (32, 8, 128, "int8", 2),
        (8, 1, 128, "int8", 0.5),  # a word row that is half empty
    ],
)
def test_a_block_takes_what_its_words_take(heads: int, kv_heads: int, head_dim: int, dtype: str, kib: float) -> None:
    attention = make(PallasAttention, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert attention.bytes_per_block == kib * 1024 * 32 * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_has_block_sizes_that_fit(dtype: str) -> None:
    for block_size, kv_heads, group, head_dim in itertools.product(
        (8, 16, 32, 2048, 8192), (1, 2, 5, 8, 16, 32, 40), (2, 4, 8, 16), (64, 96, 128, 256)
    ):
        layout = WordLayout(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        sizes = block_sizes(layout, group, block_size)
        assert sizes.block % sizes.unit == 0
        assert block_size % sizes.unit == 0
        assert sizes.block % sizes.part == 0
        # No model has more query heads on a chip, and two of the smallest blocks of more words are too large for v4.
        if kv_heads * group <= 64 and layout.word_rows * 512 * 128 <= 2 << 20:
            assert vmem_bytes(layout, sizes, group, block_size) <= 12 << 20


def vmem_bytes(layout: WordLayout, sizes: BlockSizes, group: int, block_size: int) -> int:
    spec = KernelSpec(
        layout=layout,
        sizes=sizes,
        group=group,
        block_size=block_size,
        soft_cap=None,
        has_sinks=False,
        decode_only=False,
        interpret=False,
    )
    scratch = scratch_shapes(spec, table_parts=8)
    held = [scratch.blocks, scratch.maximum, scratch.total, scratch.weighted, *scratch.decode, *scratch.mixed]
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in held)


def make(kind: type[PagedAttention], **changes: Any) -> PagedAttention:
    shape: dict[str, Any] = {
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 128,
        "block_size": 32,
        "window": None,
        "dtype": "bfloat16",
    }
    return kind(**{**shape, **changes})


@pytest.mark.parametrize("kind", [PallasAttention, LibraryAttention, NativeAttention, XlaAttention])
def test_common_shapes_are_no_problem(kind: type[PagedAttention]) -> None:
    assert make(kind).problem() is None


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (PallasAttention, {"head_dim": 320}, "up to 256 elements, not 320"),
        (PallasAttention, {"block_size": 24}, "a power of two of 8 tokens or more, not 24"),
        (PallasAttention, {"num_heads": 9}, "9 query heads can't share 4 kv heads"),
        (LibraryAttention, {"head_dim": 64}, "heads of 128 or 256 elements, not 64"),
        (LibraryAttention, {"num_kv_heads": 3, "num_heads": 6}, "multiples of 8 kv heads a chip, not 3"),
        (LibraryAttention, {"block_size": 2048}, "fetches whole blocks: 2048 tokens"),
        (LibraryAttention, {"dtype": "int8"}, "not int8 with scales of their own"),
        (LibraryAttention, {"chunk": 8192}, "no chunked attention"),
        (NativeAttention, {"soft_cap": 30.0}, "no soft cap"),
        (NativeAttention, {"dtype": "int8"}, "no keys and values in int8"),
        (NativeAttention, {"head_dim": 20}, "no head_dim=20"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(kind: type[PagedAttention], changes: Any, reason: str) -> None:
    problem = make(kind, **changes).problem()
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem


def test_rows_longer_than_their_table_in_scalar_memory_are_refused() -> None:
    attention = make(PallasAttention)
    qkv, rotary, cache, inputs, extra = abstract_arguments(attention, tokens=ROWS, decode_only=True, context=2_000_000)
    with pytest.raises(ValueError, match="use a larger block_size"):
        jax.eval_shape(attention, qkv, rotary, cache, jnp.int32(0), inputs, extra)
