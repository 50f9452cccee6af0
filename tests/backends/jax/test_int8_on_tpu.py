"""int8 weights in programs compiled for TPUs: what crosses from HBM are the packed bytes, once, and no copy is made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends.jax.analysis import measure_traffic, parse_hlo
from backends.jax.topology import open_topology, take_devices
from backends.jax.weights import QuantizedWeight

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'")

LAYERS = 4
ONE_CHIP = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1", "tpu7x": "tpu7x:1x1x1"}
GATE_UP_8B = (28672, 4096)  # [out, in]
GATE_UP_70B_OVER_16_CHIPS = (3584, 8192)


def compile_for(topology: str, program: Any, *shapes: Any) -> Any:
    mesh = Mesh(take_devices(open_topology(topology), 1), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return jax.jit(program).lower(*placed).compile()


def weight(*shape: int) -> QuantizedWeight:
    """The shapes of a quantized matrix [(layers,) out, in]."""
    scale: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    data: Any = jax.ShapeDtypeStruct(shape, jnp.int8)
    return QuantizedWeight(data=data, scale=scale, dtype="bfloat16")


def activations(tokens: int, width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)


def num_bytes(*shapes: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def mlp(up: QuantizedWeight, down: QuantizedWeight, x: jax.Array) -> jax.Array:
    def layer(i: jax.Array, x: jax.Array) -> jax.Array:
        count = jnp.zeros(1, jnp.int32)
        h = jax.nn.silu(up.at_layer(i).linear(x, count)).astype(x.dtype)
        return x + down.at_layer(i).linear(h, count).astype(x.dtype)

    return jax.lax.fori_loop(0, LAYERS, layer, x)


@pytest.mark.parametrize(
    ("generation", "matrix", "tokens"),
    [
        ("v5e", GATE_UP_8B, 8),
        ("v5e", GATE_UP_70B_OVER_16_CHIPS, 64),
        ("v5e", GATE_UP_70B_OVER_16_CHIPS, 256),
        ("v6e", GATE_UP_8B, 8),
        ("v5p", GATE_UP_70B_OVER_16_CHIPS, 8),
        ("tpu7x", GATE_UP_70B_OVER_16_CHIPS, 8),
    ],
)
def test_a_loop_over_layers_reads_packed_bytes_once(generation: str, matrix: tuple[int, int], tokens: int) -> None:
    out, inner = matrix
    shapes = weight(LAYERS, out, inner), weight(LAYERS, inner, out), activations(tokens, inner)
    compiled = compile_for(ONE_CHIP[generation], mlp, *shapes)
    # Between the products, activations may go through HBM: once as written, once as read, for each product and layer.
    passed = LAYERS * 2 * num_bytes(activations(tokens, out), activations(tokens, inner))
    found = measure_traffic(parse_hlo(compiled.as_text()))
    assert found.unknown_loops == 0
    assert num_bytes(shapes[:2]) <= found.hbm_bytes <= 1.02 * num_bytes(shapes) + 2 * passed
    assert compiled.memory_analysis().temp_size_in_bytes <= passed / LAYERS + (1 << 20)


@pytest.mark.parametrize("tokens", [8, 256])
def test_an_output_projection_reads_packed_bytes_once(tokens: int) -> None:
    table, x = weight(128256, 4096), activations(tokens, 4096)
    compiled = compile_for("v5e:1x1", lambda table, x: table.linear(x, jnp.zeros(1, jnp.int32)).argmax(-1), table, x)
    found = measure_traffic(parse_hlo(compiled.as_text()))
    logits = tokens * 128256 * 4
    assert found.hbm_bytes <= 1.02 * num_bytes(table, x) + 2 * logits
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.1 * logits


def test_an_embedding_reads_the_rows_it_takes() -> None:
    table, ids = weight(128256, 4096), jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = compile_for("v5e:1x1", lambda table, ids: table.take_rows(ids), table, ids)
    assert measure_traffic(parse_hlo(compiled.as_text())).hbm_bytes < 4 << 20
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
