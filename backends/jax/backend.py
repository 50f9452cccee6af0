"""JaxBackend: a Llama-family decoder on JAX devices; on CPU with native kernels where they can be compiled."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from functools import partial
from typing import Any

import jax
import numpy as np

from backends.jax import native
from backends.jax.attention import NativeAttention, PagedAttention, XlaAttention
from backends.jax.buckets import Buckets
from backends.jax.compilation import (
    CompilationCounter,
    cache_dir,
    compile_all,
    default_cache_dir,
    enable_persistent_cache,
)
from backends.jax.idle import idle_batch
from backends.jax.loading import ParameterLoader
from backends.jax.memory import KVPlan, device_memory_bytes, plan_kv_cache, weight_bytes
from backends.jax.model import Decoder, Params
from backends.jax.model_config import ModelConfig
from backends.jax.native.build import BuildError
from backends.jax.open_model import open_model
from backends.jax.operations import NativeOperations, XlaOperations
from backends.jax.result import DispatchedStep
from backends.jax.sampling import sample_native, sample_xla
from backends.jax.sharding import create_mesh, sharding
from backends.jax.slots import SlotTables, new_history, new_slot_tables, slot_row, write_slot
from backends.jax.step import DeviceState, StepProgram, StepShape
from engine.backend import (
    Backend,
    BackendError,
    BackendInfo,
    Capabilities,
    PendingStep,
    Progress,
    no_progress,
)
from engine.batch import SlotState, StepBatch
from engine.config import GIB, EngineConfig

logger = logging.getLogger(__name__)

CPU_CHUNK_TOKENS = 256
"""Default step budget: a longer chunk is no cheaper per token on CPU, and makes running requests wait longer."""


class JaxBackend(Backend):
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        self._counter = CompilationCounter()
        self._programs: dict[StepShape, Any] = {}
        self._capabilities = Capabilities()
        self._info: BackendInfo | None = None

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        if self._info is not None:
            return self._info
        config = self._config
        model, checkpoint = open_model(config)
        enable_persistent_cache(cache_dir(config))
        self._mesh = create_mesh()
        use_native = self._load_native(model)
        attention = self._attention(model, use_native)
        plan = plan_kv_cache(
            config,
            weight_bytes=weight_bytes(checkpoint.shapes, self._dtype),
            bytes_per_block=attention.bytes_per_block,
            model_max_len=model.max_position,
            max_rows=config.max_decode_seqs,
            device_bytes=device_memory_bytes(config),
        )
        info = self._describe(model, attention, plan, use_native)
        self._buckets = Buckets(
            config,
            max_tokens=info.max_step_tokens,
            max_rows=info.max_step_rows,
            block_size=config.block_size,
            max_model_len=plan.max_model_len,
            pads_tables=attention.pads_tables,
        )
        loader = ParameterLoader(
            model, checkpoint, self._mesh, dtype=self._dtype, packed=use_native, stacked=use_native
        )
        self._params: Params = loader.load(progress)
        self._allocate(attention, plan, progress)
        operations = NativeOperations() if use_native else XlaOperations()
        self._program = StepProgram(
            decoder=Decoder(config=model, attention=attention, operations=operations),
            sampler=sample_native if use_native else sample_xla,
        )
        self._jit = jax.jit(self._program, donate_argnums=1, static_argnames="shape")
        self._write_slot = jax.jit(write_slot, donate_argnums=(0, 1))
        self._info = info
        if not config.warmup:
            self._counter.arm()
        return info

    def _load_native(self, model: ModelConfig) -> bool:
        """Whether the native kernels are used: as the option says, else where they can be."""
        if self._config.attention == "xla":
            return False
        problem = None
        if not NativeAttention.supports(model.head_dim, self._config.block_size):
            problem = f"they don't support head_dim={model.head_dim} with block_size={self._config.block_size}"
        elif model.hidden_size % 2 or model.intermediate_size % 2:
            problem = "they want even hidden and intermediate sizes"
        else:
            try:
                native.load_kernels(cache_dir(self._config) or default_cache_dir())
            except (BuildError, OSError) as error:
                problem = str(error)
        if problem is None:
            return True
        if self._config.attention == "native":
            raise BackendError(f"attention=native is not possible: {problem}")
        logger.warning("native CPU kernels are off, plain XLA is slower: %s", problem)
        return False

    def _attention(self, model: ModelConfig, use_native: bool) -> PagedAttention:
        implementation = NativeAttention if use_native else XlaAttention
        return implementation(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=self._config.block_size,
            window=model.sliding_window,
            dtype=self._dtype,
        )

    def _describe(self, model: ModelConfig, attention: PagedAttention, plan: KVPlan, use_native: bool) -> BackendInfo:
        config = self._config
        kernels = "native kernels" if use_native else "XLA"
        whole_prompt = CPU_CHUNK_TOKENS if config.enable_chunked_prefill else plan.max_model_len
        return BackendInfo(
            device=f"{jax.devices()[0].platform} x1 ({self._dtype}, {kernels})",
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            bytes_per_block=attention.bytes_per_block,
            max_step_tokens=config.max_num_batched_tokens or max(whole_prompt, config.max_decode_seqs),
            max_step_rows=config.max_decode_seqs,
            max_prefill_rows=config.max_prefill_seqs or config.max_decode_seqs,
            capabilities=self._capabilities,
        )

    def _allocate(self, attention: PagedAttention, plan: KVPlan, progress: Progress) -> None:
        blocks = plan.num_blocks
        size = blocks * attention.bytes_per_block
        detail = f"{blocks * attention.block_size} tokens, {size / GIB:.2f} GiB"
        progress("allocating KV blocks", 0, blocks, detail)
        placed = sharding(self._mesh)
        cache = attention.cache_shape(blocks)
        self._state: DeviceState = jax.device_put(
            DeviceState(
                cache=jax.numpy.zeros(cache.shape, cache.dtype),
                history=new_history(self._config.max_decode_seqs, plan.max_model_len),
            ),
            placed,
        )
        self._tables: SlotTables = jax.device_put(
            new_slot_tables(self._config.max_decode_seqs, self._capabilities), placed
        )
        jax.block_until_ready(self._state.cache)
        logger.info("KV cache: %d blocks, %s (%d bytes)", blocks, detail, size)
        progress("allocating KV blocks", blocks, blocks, detail)

    def warmup(self, progress: Progress = no_progress) -> None:
        shapes = self._buckets.shapes
        started = time.monotonic()
        if self._config.enable_jit:
            lowered = ((shape, partial(self._lower, shape)) for shape in shapes)
            self._programs = dict(compile_all(lowered, len(shapes), os.cpu_count() or 1, progress))
        for done, shape in enumerate(shapes, start=1):
            self._run(idle_batch(), shape).result()
            progress("running each program once", done, len(shapes))
        self._apply(SlotState(slot=self._config.max_decode_seqs, token_ids=np.zeros(0, np.int32)))
        logger.info("%d programs ready in %.1f s", len(shapes), time.monotonic() - started)
        self._counter.arm()

    def _lower(self, shape: StepShape) -> Any:
        packed = jax.ShapeDtypeStruct((shape.packed_size,), np.int32, sharding=sharding(self._mesh))
        return self._jit.lower(self._params, self._state, self._tables, packed, shape=shape)

    def dispatch(self, batch: StepBatch) -> PendingStep:
        for state in batch.slot_states:
            self._apply(state)
        return self._run(batch, self._buckets.choose(batch))

    def _apply(self, state: SlotState) -> None:
        row, history = slot_row(state, self._capabilities, self._state.history.shape[1])
        tables, new = self._write_slot(self._tables, self._state.history, np.int32(state.slot), row, history)
        self._tables = tables
        self._state = DeviceState(cache=self._state.cache, history=new)

    def _run(self, batch: StepBatch, shape: StepShape) -> PendingStep:
        packed = shape.pack(batch, dump_slot=self._config.max_decode_seqs)
        if not self._config.enable_jit:
            with jax.disable_jit():
                outputs = self._program(self._params, self._state, self._tables, jax.numpy.asarray(packed), shape)
        else:
            program = self._programs.get(shape)
            if program is None:  # warmup=false: compile what is needed when it is needed
                program = self._programs[shape] = self._lower(shape).compile()
            outputs = program(self._params, self._state, self._tables, packed)
        self._state, result, prompt = outputs
        wants_logprobs = bool((batch.sampling.num_logprobs >= 0).any())
        return DispatchedStep(batch, result, prompt if batch.prompt_logprobs.any() else None, wants_logprobs)

    @property
    def compilations_after_warmup(self) -> int:
        return self._counter.count

    def close(self) -> None:
        self._counter.close()
        self._programs.clear()
        for name in ("_state", "_tables", "_params"):
            with contextlib.suppress(AttributeError):
                delattr(self, name)
