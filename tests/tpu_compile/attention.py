"""Compiles attention for TPU chips that are not here: one chip's heads, two layers looped over, a donated cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends.jax.attention import AttentionInputs, LayerArrays, PagedAttention, PallasAttention
from backends.jax.rope import Rotary
from backends.jax.topology import open_topology, take_devices

ONE_CHIP = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
LAYERS = 2
CACHE_BYTES = 2 << 30  # large: XLA must neither copy it nor move it to VMEM
ROWS = 64
CONTEXT = 32768  # tokens


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One chip's share of a model's attention, and what the family adds to it."""

    models: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"
    block_size: int = 32
    implementation: type[PagedAttention] = field(default=PallasAttention)

    def __str__(self) -> str:
        shape = f"{self.heads}-{self.kv_heads}-{self.head_dim}-{self.dtype}-{self.block_size}"
        return f"{self.models.replace(' ', '_')}-{shape}"

    @property
    def attention(self) -> PagedAttention:
        return self.implementation(
            num_layers=LAYERS,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            dtype=self.dtype,
        )


def compile_attention(heads: Heads, generation: str, *, decode_only: bool) -> Any:
    """The compiled program of ROWS decoding rows, or of 512 tokens in as many rows."""
    attention = heads.attention
    assert attention.problem() is None
    mesh = Mesh(take_devices(open_topology(ONE_CHIP[generation]), 1), ("model",))
    tokens = ROWS if decode_only else 512
    arguments = abstract_arguments(attention, tokens=tokens, decode_only=decode_only, sinks=heads.sinks)
    placed = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)

    def layers(qkv: Any, rotary: Rotary, cache: Any, inputs: AttentionInputs, extra: LayerArrays) -> Any:
        def one(index: jax.Array, carry: Any) -> Any:
            cache, x = carry
            out, cache = attention(x, rotary, cache, index, inputs, extra)
            return cache, x.at[:, : heads.heads].add(out)

        return jax.lax.fori_loop(0, LAYERS, one, (cache, qkv))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # JAX's own kernel asks which chip it is for
        return jax.jit(layers, donate_argnums=2).lower(*arguments).compile()


def abstract_arguments(
    attention: PagedAttention, *, tokens: int, decode_only: bool, sinks: bool = False, context: int = CONTEXT
) -> Any:
    """Shapes of qkv, rotary, cache, inputs and extra, as attention takes them."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    heads, head_dim = attention.num_heads, attention.head_dim
    inputs = AttentionInputs(
        positions=array(tokens),
        token_rows=array(tokens),
        query_starts=array(ROWS + 1),
        kv_lens=array(ROWS),
        block_tables=array(ROWS, -(-context // attention.block_size)),
        num_rows=array(1),
        num_tokens=array(1),
        decode_only=decode_only,
    )
    angles = array(tokens, head_dim // 2, dtype=jnp.float32)
    qkv = array(tokens, heads + 2 * attention.num_kv_heads, head_dim, dtype=jnp.bfloat16)
    extra = LayerArrays(sinks=array(heads, dtype=jnp.float32) if sinks else None)
    return qkv, Rotary(cos=angles, sin=angles), attention.cache_shape(num_blocks(attention)), inputs, extra


def num_blocks(attention: PagedAttention) -> int:
    return CACHE_BYTES // attention.bytes_per_block


def check_memory(attention: PagedAttention, compiled: Any) -> None:
    """The cache is updated in place, takes in HBM what bytes_per_block says, and little else is needed."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == attention.bytes_per_block * (num_blocks(attention) + 1)
    assert memory.temp_size_in_bytes < 64 << 20
