"""Deployment: all that follows from options, model and mesh before any array exists.

Kernels, shardings, shapes and step programs are the same whether the mesh's devices are here or not: JaxBackend
allocates and runs what a Deployment describes, ahead-of-time compilation compiles it for a slice that isn't there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from backends.jax.attention import PagedAttention
from backends.jax.buckets import Buckets
from backends.jax.collectives import Collectives, MeshCollectives, SequenceCollectives
from backends.jax.compilation import compiler_options
from backends.jax.kernels import Kernels, paged_attention
from backends.jax.layout import ParameterLayout
from backends.jax.memory import CPU_DEFAULT_KV_BYTES, KVPlan, plan_kv_cache
from backends.jax.model import Decoder, Params
from backends.jax.model_config import ModelConfig
from backends.jax.operations import NativeOperations, Operations, XlaOperations
from backends.jax.partition import TPU_LANES, Partition
from backends.jax.sampling import sample_native, sample_xla
from backends.jax.selection import TokenSelector
from backends.jax.sharding import MODEL, sharded_shape
from backends.jax.slots import SlotTables, history_shape, slot_bytes, slot_table_shapes
from backends.jax.step import DeviceState, StepProgram, StepShape
from backends.jax.storage import choose_storage
from engine.backend import BackendError, Capabilities
from engine.config import EngineConfig
from engine.pools import Pools

logger = logging.getLogger(__name__)

CPU_CHUNK_TOKENS = 256
"""Default step budget: a longer chunk is no cheaper per token on CPU, and makes running requests wait longer."""
TPU_CHUNK_TOKENS = 2048
"""Default step budget: several times the tokens at which reading the weights takes as long as multiplying by them."""

TPU_SHARED_BYTES = 32 << 20
"""Steps whose residual stream takes as much share out norms and residuals. A smaller one stays in VMEM anyway: compiled
for v5e:2x2, an 8B model's step of 2048 tokens (32 MiB) moves half the HBM bytes then, one of 1024 just as many."""

KV_EXCHANGE_BYTES, KV_EXCHANGE_BLOCKS = 256 << 20, 256
"""What KV that is read or written takes at most: eight of the largest batches (backends.jax.kv_exchange)."""

Step = Callable[[Params, DeviceState, SlotTables, jax.Array], tuple[DeviceState, jax.Array, jax.Array]]


@dataclass(frozen=True)
class Deployment:
    """One engine's share of a slice.

    Args:
        mesh: devices of this process, of several, or of a topology description.
        context: longest sequence in tokens; None: what options and model say. What a plan found to fit comes back here.
        stacked: whether layers are stacked and looped over on the device; None: where that is fast.
        share_tokens_from: fewest tokens of a step from which chips share out norms and residuals; None: where it pays.
    """

    config: EngineConfig
    model: ModelConfig
    mesh: Mesh
    kernels: Kernels = field(kw_only=True)
    context: int | None = field(kw_only=True, default=None)
    stacked: bool | None = field(kw_only=True, default=None)
    share_tokens_from: int | None = field(kw_only=True, default=None)
    capabilities: Capabilities = field(kw_only=True, default=Capabilities(kv_exchange=True))

    @property
    def platform(self) -> str:
        """ "cpu" or "tpu"."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def chips(self) -> int:
        """Chips (JAX devices) that share each layer."""
        return int(self.mesh.shape[MODEL])

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.config.dtype == "auto" else self.config.dtype

    @property
    def max_model_len(self) -> int:
        return self.context or self.config.max_model_len or self.model.max_position

    @property
    def max_step_tokens(self) -> int:
        chunk = CPU_CHUNK_TOKENS if self.platform == "cpu" else TPU_CHUNK_TOKENS
        whole_prompt = chunk if self.config.enable_chunked_prefill else self.max_model_len
        return self.config.max_num_batched_tokens or max(whole_prompt, self.config.max_decode_seqs)

    @cached_property
    def partition(self) -> Partition:
        lanes = 1 if self.platform == "cpu" else TPU_LANES
        return Partition(model=self.model, chips=self.chips, lanes=lanes)

    @cached_property
    def attention(self) -> PagedAttention:
        """Attention of one chip's heads."""
        return paged_attention(
            self.kernels, self.model, self.partition.heads, block_size=self.config.block_size, dtype=self.dtype
        )

    def supported(self) -> Deployment:
        """This deployment, on plain XLA if its attention can't do the model's shapes and nobody asked for it.

        Raises:
            BackendError: somebody did.
        """
        problem = self.attention.problem()
        if problem is None:
            return self
        if self.config.attention != "auto":
            raise BackendError(f"attention={self.config.attention} is not possible: {problem}")
        logger.warning("attention in plain XLA, which is slower: %s", problem)
        return replace(self, kernels="xla")

    @cached_property
    def layout(self) -> ParameterLayout:
        storage = choose_storage(self.dtype, self.config.quantization, packed=self.kernels == "native")
        stacked = self.stacked if self.stacked is not None else self.platform != "cpu" or self.kernels == "native"
        return ParameterLayout(partition=self.partition, mesh=self.mesh, storage=storage, stacked=stacked)

    @cached_property
    def buckets(self) -> Buckets:
        return Buckets(
            self.config,
            max_tokens=self.max_step_tokens,
            max_rows=self.config.max_decode_seqs,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            pads_tables=self.attention.pads_tables,
        )

    @property
    def step_shapes(self) -> list[StepShape]:
        """What warm-up compiles and runs."""
        return self.buckets.shapes

    def parameter_shapes(self) -> Params:
        return self.layout.shapes()

    def state_shapes(self, num_blocks: int) -> DeviceState:
        cache = self.attention.cache_shape(num_blocks)
        history = history_shape(self.config.max_decode_seqs, self.max_model_len)
        return DeviceState(
            cache=sharded_shape(self.mesh, cache.shape, ("chips",), cache.dtype),  # type: ignore[arg-type]
            history=sharded_shape(self.mesh, history, (), np.int32),  # type: ignore[arg-type]
        )

    def table_shapes(self) -> SlotTables:
        tables = slot_table_shapes(self.config.max_decode_seqs, self.capabilities)
        shapes: SlotTables = jax.tree.map(lambda x: sharded_shape(self.mesh, x.shape, (), x.dtype), tables)
        return shapes

    @property
    def weight_bytes_per_device(self) -> int:
        return sum(p.num_bytes for p in self.layout.stored)

    @property
    def kv_bytes_per_block_per_device(self) -> int:
        return self.attention.bytes_per_block

    @property
    def other_bytes_per_device(self) -> int:
        """Token history and slot tables, and KV on its way in and out."""
        slots = slot_bytes(self.config.max_decode_seqs, self.max_model_len, self.capabilities)
        moving = min(KV_EXCHANGE_BYTES, KV_EXCHANGE_BLOCKS * self.kv_bytes_per_block_per_device)
        return slots + (moving if self.config.exchanges_kv else 0)

    def plan(self, device_bytes: int) -> KVPlan:
        """How many blocks and how long a sequence fit into a device's memory.

        Raises:
            BackendError: what the options ask for does not fit.
        """
        sharing = self.chips * Pools.largest(self.config).replicas  # simulated devices of one host's memory
        return plan_kv_cache(
            self.config,
            weight_bytes=self.weight_bytes_per_device,
            other_bytes=self.other_bytes_per_device,
            bytes_per_block=self.kv_bytes_per_block_per_device,
            model_max_len=self.model.max_position,
            max_rows=self.config.max_decode_seqs,
            device_bytes=device_bytes,
            kv_limit=CPU_DEFAULT_KV_BYTES // sharing if self.platform == "cpu" else None,
        )

    def within(self, plan: KVPlan) -> Deployment:
        """The same with the context that the plan found to fit."""
        return replace(self, context=plan.max_model_len)

    def step(self, shape: StepShape) -> Step:
        """The step program over the whole mesh, not compiled yet."""
        program = partial(self._program(shape.tokens), shape=shape)
        if self.chips == 1:
            return program
        specs = jax.tree.map(
            lambda x: x.sharding.spec, (self.parameter_shapes(), self.state_shapes(0), self.table_shapes())
        )
        everywhere = PartitionSpec()
        # What is replicated in the end (tokens, history) is so by construction, which the checker can't follow.
        return jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=(*specs, everywhere),
            out_specs=(specs[1], everywhere, everywhere),
            check_vma=False,
        )

    def lower(self, shape: StepShape, params: Params, state: DeviceState, tables: SlotTables) -> jax.stages.Lowered:
        """Lowers the step for arrays, or shapes of arrays, with the deployment's shardings. The state is donated."""
        packed = sharded_shape(self.mesh, (shape.packed_size,), (), np.int32)
        options = compiler_options(self.mesh.devices.flat[0])
        step = jax.jit(self.step(shape), donate_argnums=1, compiler_options=options)
        if self.kernels != "library":
            return step.lower(params, state, tables, packed)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # JAX's own kernel asks which chip it is for
            return step.lower(params, state, tables, packed)

    @property
    def decoder(self) -> Decoder:
        """The forward pass of one chip, for steps of any number of tokens."""
        return self._decoder(1)

    def _decoder(self, tokens: int) -> Decoder:
        return Decoder(
            config=self.model,
            attention=self.attention,
            operations=self._operations,
            collectives=self._collectives(tokens),
        )

    def _program(self, tokens: int) -> StepProgram:
        native = self.kernels == "native"
        sampler = sample_native if native else sample_xla
        selector = TokenSelector(sampler=sampler, vocab_size=self.model.vocab_size, one_pass=native)
        return StepProgram(decoder=self._decoder(tokens), selector=selector)

    @property
    def _operations(self) -> Operations:
        if self.kernels == "native":
            return NativeOperations()
        return XlaOperations(dtype=jnp.float32 if self.platform == "cpu" else jnp.dtype(self.dtype))

    def _collectives(self, tokens: int) -> Collectives:
        vocab = self.partition.vocab_per_chip
        if self.chips == 1:
            return Collectives(vocab_per_chip=vocab)
        kind = SequenceCollectives if self._shares(tokens) else MeshCollectives
        return kind(vocab_per_chip=vocab, chips=self.chips)

    def _shares(self, tokens: int) -> bool:
        """Whether each chip norms its share of the tokens. The native kernels can't: they count valid tokens."""
        fewest = self.share_tokens_from
        if fewest is None:
            fewest = tokens + 1 if self.platform == "cpu" else TPU_SHARED_BYTES // (4 * self.model.hidden_size)
        return self.kernels != "native" and tokens >= max(fewest, self.chips) and tokens % self.chips == 0
