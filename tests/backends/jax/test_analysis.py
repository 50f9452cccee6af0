"""The traffic analysis against programs whose bytes and FLOPs follow from a formula, compiled for v5e."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends.jax.analysis import Collective, Traffic, measure_traffic, parse_hlo
from backends.jax.topology import open_topology, take_devices

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'")

LAYERS, HIDDEN, INNER, TOKENS = 8, 2048, 8192, 64
BF16 = jnp.bfloat16
Spec = PartitionSpec


def compiled_text(program: Callable[..., Any], *shapes: tuple[Any, ...], chips: int = 1, donate: Any = ()) -> str:
    """Compiles for v5e; each shape is (dims, dtype) or (dims, dtype, spec)."""
    mesh = Mesh(take_devices(open_topology("v5e:2x2" if chips > 1 else "v5e:1x1"), chips), ("model",))
    arguments = [
        jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, rest[0] if rest else Spec()))
        for dims, dtype, *rest in shapes
    ]
    if chips > 1:
        specs = tuple(argument.sharding.spec for argument in arguments)
        program = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=Spec(), check_vma=False)
    return str(jax.jit(program, donate_argnums=donate).lower(*arguments).compile().as_text())


def traffic_of(program: Callable[..., Any], *shapes: tuple[Any, ...], **options: Any) -> Traffic:
    taken = options.pop("taken", min)
    return measure_traffic(parse_hlo(compiled_text(program, *shapes, **options)), taken=taken)


def mlp(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=BF16)
    return product(jax.nn.silu(product(x, up)), down)


def stacked_mlp(up: jax.Array, down: jax.Array, x: jax.Array, reduce: Callable[[jax.Array], jax.Array]) -> jax.Array:
    def layer(i: jax.Array, x: jax.Array) -> jax.Array:
        return x + reduce(mlp(up[i], down[i], x))

    return jax.lax.fori_loop(0, LAYERS, layer, x)


def test_a_matrix_product_reads_its_operands_and_writes_its_result() -> None:
    found = traffic_of(lambda x, w: x @ w, ((4096, HIDDEN), BF16), ((HIDDEN, INNER), BF16))
    assert found.read == pytest.approx(2 * (4096 * HIDDEN + HIDDEN * INNER), rel=0.02)
    assert found.written == pytest.approx(2 * 4096 * INNER, rel=0.02)
    assert found.flops == 2 * 4096 * HIDDEN * INNER


def test_a_loop_over_stacked_weights_reads_each_layer_once() -> None:
    program = partial(stacked_mlp, reduce=lambda y: y)
    shapes = ((LAYERS, INNER, HIDDEN), BF16), ((LAYERS, HIDDEN, INNER), BF16), ((TOKENS, HIDDEN), BF16)
    found = traffic_of(program, *shapes)
    assert found.hbm_bytes == pytest.approx(2 * LAYERS * 2 * HIDDEN * INNER, rel=0.02)
    assert found.flops == pytest.approx(LAYERS * 2 * 2 * TOKENS * HIDDEN * INNER, rel=0.001)
    assert found.unknown_loops == 0
    assert found.largest[0][0] == pytest.approx(found.hbm_bytes / 2, rel=0.02)


def test_collectives_count_as_often_as_the_loop_runs() -> None:
    program = partial(stacked_mlp, reduce=lambda y: jax.lax.psum(y, "model"))
    found = traffic_of(
        program,
        ((LAYERS, INNER, HIDDEN), BF16, Spec(None, "model", None)),
        ((LAYERS, HIDDEN, INNER), BF16, Spec(None, None, "model")),
        ((TOKENS, HIDDEN), BF16),
        chips=4,
    )
    assert found.hbm_bytes == pytest.approx(2 * LAYERS * 2 * HIDDEN * INNER / 4, rel=0.02)
    assert found.collectives == (Collective(kind="all-reduce", bytes=2 * TOKENS * HIDDEN, group_size=4, count=LAYERS),)


def test_other_collectives_count_with_what_crosses_the_wires() -> None:
    def program(x: jax.Array) -> jax.Array:
        mine = jax.lax.psum_scatter(x, "model", tiled=True)
        return jax.lax.all_gather(mine * 2, "model", tiled=True)

    whole = 4 * 1024 * HIDDEN
    found = traffic_of(program, ((1024, HIDDEN), jnp.float32), chips=4)
    assert {(c.kind, c.bytes, c.group_size) for c in found.collectives} == {
        ("reduce-scatter", whole, 4),
        ("all-gather", whole, 4),
    }


def test_rows_taken_from_a_table_count_and_the_table_does_not() -> None:
    found = traffic_of(lambda t, ids: t[ids].astype(jnp.float32), ((100_000, HIDDEN), BF16), ((TOKENS,), jnp.int32))
    rows = TOKENS * HIDDEN
    assert rows * 2 <= found.hbm_bytes <= rows * (2 + 2 + 4 + 4) + 4096


def test_an_update_in_place_counts_what_changes() -> None:
    def program(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, new, (place, 0, 0))

    shapes = ((1024, 64, HIDDEN), BF16), ((1, 64, HIDDEN), BF16), ((), jnp.int32)
    found = traffic_of(program, *shapes, donate=0)
    assert found.hbm_bytes == pytest.approx(2 * 2 * 64 * HIDDEN, rel=0.02)


def test_an_array_that_is_not_donated_is_copied_and_the_copy_counts() -> None:
    shapes = ((1024, 64, HIDDEN), BF16), ((1, 64, HIDDEN), BF16)
    found = traffic_of(lambda cache, new: jax.lax.dynamic_update_slice(cache, new, (3, 0, 0)), *shapes)
    assert found.hbm_bytes >= 2 * 2 * 1024 * 64 * HIDDEN


def test_tiles_count_with_their_padding() -> None:
    """64 of the 128 lanes of each tile are padding, and cross the wire to HBM all the same."""
    found = traffic_of(lambda x: x + 1, ((4096, 8, 64), jnp.float32))
    text = compiled_text(lambda x: x + 1, ((4096, 8, 64), jnp.float32))
    (parameter,) = parse_hlo(text).entry.parameters
    assert found.read == parameter.hbm_bytes >= 4 * 4096 * 8 * 64


@pytest.mark.parametrize("taken", [min, max])
def test_of_a_conditional_one_branch_counts(taken: Callable[[list[int]], int]) -> None:
    def program(flag: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(flag[0] != 0, lambda: jnp.sum(x @ w), lambda: jnp.sum(x))

    found = traffic_of(program, ((1,), jnp.int32), ((INNER, INNER), BF16), ((INNER, INNER), BF16), taken=taken)
    size = 2 * INNER * INNER
    assert found.read == pytest.approx(size if taken is min else 2 * size, rel=0.02)


def test_a_loop_of_unknown_length_is_reported() -> None:
    def program(rounds: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds[0], lambda _, x: x * 2, x)

    assert traffic_of(program, ((1,), jnp.int32), ((HIDDEN, HIDDEN), jnp.float32)).unknown_loops == 1


def test_steps_other_than_one_are_understood() -> None:
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, x = carry
            return i + 3, x @ jax.lax.dynamic_index_in_dim(w, i, keepdims=False)

        start = (jnp.int32(2), x)
        return jax.lax.while_loop(lambda carry: carry[0] < 12, body, start)[1]

    found = traffic_of(program, ((TOKENS, HIDDEN), BF16), ((12, HIDDEN, HIDDEN), BF16))
    assert found.flops == 4 * 2 * TOKENS * HIDDEN * HIDDEN  # rounds 2, 5, 8, 11


def test_memory_of_layouts_by_hand() -> None:
    text = "ENTRY %main (a: bf16[3,5,200]) -> bf16[3,5,200] {\n  ROOT %a = {shape} parameter(0)\n}\n"
    for shape, size in {
        "bf16[3,5,200]{2,1,0:T(8,128)(2,1)}": 3 * 8 * 256 * 2,
        "bf16[3,5,200]{2,0,1:T(8,128)(2,1)}": 5 * 8 * 256 * 2,
        "bf16[3,5,200]": 3 * 5 * 200 * 2,
        "s4[3,5,200]{2,1,0:T(8,128)}": 3 * 8 * 256 // 2,
        "f8e4m3fn[3,5,200]{2,1,0:T(8,128)(4,1)S(1)}": 0,
    }.items():
        assert parse_hlo(text.replace("{shape}", shape)).entry.root.hbm_bytes == size, shape
