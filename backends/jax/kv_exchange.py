"""KV blocks in and out of a deployment's cache: constant-shape programs on the devices, re-cutting on the host.

On the devices, blocks are put into the order of tokens one by one, as many as there are; the batch they are collected
in has one of two sizes, so that nothing compiles later. On the host, a batch is cut to the tokens and heads that were
asked for, or put together from shares of any tensor-parallel size and block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from backends.jax.compilation import compile_program, compiler_options
from backends.jax.deployment import Deployment
from backends.jax.kv_layouts import BlockLayout, block_layout
from backends.jax.kv_shares import ReadBlocks, ReadPart, joined
from backends.jax.sharding import MODEL, sharded_shape
from engine.kv_blocks import KVBlocks, KVFormat, KVPayload, LocalPayload, PendingBlocks, check_shares

BATCH_BYTES = 32 << 20
"""Most bytes of a batch on one chip: what a program moves at once."""
MAX_BATCH_BLOCKS = 32
SMALL_SHARE = 8
"""The smaller batch has so many times fewer blocks: a device-to-host copy moves whole batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Some blocks of a list, in one run of a program of `size` blocks."""

    first: int
    count: int
    size: int


class KVExchange:
    """Reads and writes the KV cache of one deployment; holds programs and no arrays."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._layout: BlockLayout = block_layout(deployment.attention)
        self._heads = deployment.partition.heads
        self._programs: dict[tuple[str, int], Any] = {}

    @cached_property
    def format(self) -> KVFormat:
        model = self._deployment.model
        return KVFormat(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self._deployment.attention.dtype,
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Blocks of a batch, ascending."""
        block_bytes = int(np.prod(self._layout.token_order)) * self._layout.unsigned.itemsize
        large = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes))
        return tuple(sorted({max(1, large // SMALL_SHARE), large}))

    def batches(self, count: int) -> Iterator[Batch]:
        """Cuts a list of blocks: large batches, and small ones where these move less."""
        small, large = self.sizes[0], self.sizes[-1]
        for first in range(0, count, large):
            left = min(large, count - first)
            if -(-left // small) * small > large // 2:
                yield Batch(first=first, count=left, size=large)
                continue
            for part in range(first, first + left, small):
                yield Batch(first=part, count=min(small, first + left - part), size=small)

    # -- programs

    def warm_up(self, cache: jax.Array) -> jax.Array:
        """Compiles and runs every program on the dump block. The cache is donated; gives it back."""
        dump, block_size = cache.shape[1] - 1, self._layout.attention.block_size
        for size in self.sizes:
            blocks = self.read(cache, [dump] * size, size * block_size, 0)
            cache = self.write(cache, [dump] * size, 0, LocalPayload(blocks=blocks.result()))
        jax.block_until_ready(cache)
        return cache

    def lower(self, kind: str, size: int, cache: Any) -> jax.stages.Lowered:
        """Lowers a program for a cache, or its shape: kind "read" or "write", of `size` blocks."""
        mesh = self._deployment.mesh
        ids = sharded_shape(mesh, (size,), (), np.int32)
        number = sharded_shape(mesh, (), (), np.int32)
        options = compiler_options(mesh.devices.flat[0])
        if kind == "read":
            program = self._over_mesh(self._layout.read, num_sharded=1, num_others=2)
            return jax.jit(program, compiler_options=options).lower(cache, ids, number)
        program = self._over_mesh(self._layout.write, num_sharded=2, num_others=3)
        donating = jax.jit(program, donate_argnums=0, compiler_options=options)
        return donating.lower(cache, self._batch_shape(size), ids, number, number)

    def _over_mesh(self, program: Callable[..., jax.Array], *, num_sharded: int, num_others: int) -> Any:
        """The same on every chip: of `num_sharded` first arguments and the result, each chip has its own."""
        if self._deployment.chips == 1:
            return program
        own, same = PartitionSpec(MODEL), PartitionSpec()
        specs = (*[own] * num_sharded, *[same] * num_others)
        return jax.shard_map(program, mesh=self._deployment.mesh, in_specs=specs, out_specs=own, check_vma=False)

    def _batch_shape(self, size: int) -> jax.ShapeDtypeStruct:
        layers, two, heads, block_size, d = self._layout.token_order
        local = (layers, two, heads, size * block_size, d)
        return sharded_shape(self._deployment.mesh, local, ("chips",), self._layout.unsigned)

    def _program(self, kind: str, size: int, cache: jax.Array) -> Any:
        program = self._programs.get((kind, size))
        if program is None:
            program = self._programs[kind, size] = compile_program(self.lower(kind, size, cache))
        return program

    # -- reading

    def read(self, cache: jax.Array, block_ids: Sequence[int], num_tokens: int, offset: int) -> PendingBlocks:
        """Starts to read; see Backend.read_blocks."""
        size = self._layout.attention.block_size
        parts = []
        for batch in self.batches(len(block_ids)):
            program = self._program("read", batch.size, cache)
            data: jax.Array = program(cache, _padded(block_ids, batch), np.int32(batch.count))
            data.copy_to_host_async()
            start = max(offset - batch.first * size, 0)
            end = min(offset + num_tokens - batch.first * size, batch.count * size)
            parts.append(ReadPart(data, slice(start, end)))
        return ReadBlocks(parts, self._sharing_chips, self.format)

    @cached_property
    def _sharing_chips(self) -> dict[jax.Device, range]:
        """This host's chips without those that hold padding only, or copies of what another chip of it holds."""
        chips: dict[range, jax.Device] = {}
        for chip, heads in self._chips.items():
            if heads:
                chips.setdefault(heads, chip)
        return {chip: heads for heads, chip in chips.items()}

    # -- writing

    def write(self, cache: jax.Array, block_ids: Sequence[int], offset: int, payload: KVPayload) -> jax.Array:
        """Writes into a cache, which is donated; gives the new one. See Backend.write_blocks.

        Raises:
            KVLostError: the payload is lost or does not fit this model. The cache is as it was.
        """
        shares = payload.shares()
        num_tokens = check_shares(shares, self.format, self.own_heads)
        size = self._layout.attention.block_size
        for batch in self.batches(-(-(offset + num_tokens) // size)):
            start = batch.first * size - offset  # which of the payload's tokens the batch's first one is
            cut = slice(max(start, 0), min(start + batch.count * size, num_tokens))
            data = self._put(shares, cut, cut.start - start, batch)
            program = self._program("write", batch.size, cache)
            cache = program(cache, data, _padded(block_ids, batch), np.int32(batch.count), np.int32(cut.start - start))
        return cache

    @cached_property
    def own_heads(self) -> range:
        """The model's key-value heads on this host's chips, which are neighbours."""
        heads = [head for of_chip in self._chips.values() for head in of_chip]
        return range(min(heads), max(heads) + 1) if heads else range(0)

    @cached_property
    def _chips(self) -> dict[jax.Device, range]:
        """This host's chips, and the model's key-value heads on each."""
        devices = enumerate(self._deployment.mesh.devices.flat)
        here = jax.process_index()
        return {device: self._heads.kv_heads(chip) for chip, device in devices if device.process_index == here}

    def _put(self, shares: Sequence[KVBlocks], cut: slice, at: int, batch: Batch) -> jax.Array:
        """A batch of blocks on the devices: from token `at` on it holds these tokens of the shares."""
        shape, filled = self._batch_shape(batch.size), batch.count * self._layout.attention.block_size
        assert isinstance(shape.sharding, NamedSharding)
        local = shape.sharding.shard_shape(shape.shape)
        parts = [
            jax.device_put(joined(shares, cut, at, heads, local, filled), chip) for chip, heads in self._chips.items()
        ]
        return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, parts)


def _padded(block_ids: Sequence[int], batch: Batch) -> NDArray[np.int32]:
    ids = np.zeros(batch.size, np.int32)
    ids[: batch.count] = block_ids[batch.first : batch.first + batch.count]
    return ids
