"""JaxBackend: a decoder on JAX devices, TPU or CPU: loads what a Deployment describes and runs its steps."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from backends.jax.compilation import (
    CompilationCounter,
    cache_dir,
    compile_all,
    compile_program,
    enable_persistent_cache,
    programs_dir,
)
from backends.jax.deployment import Deployment
from backends.jax.hardware import Hardware, check_hardware, select_platform
from backends.jax.hosts import agree_on_plan, engine_devices
from backends.jax.idle import idle_batch
from backends.jax.kernels import Kernels, choose_kernels
from backends.jax.kv_exchange import KVExchange
from backends.jax.loading import ParameterLoader
from backends.jax.memory import KVPlan, cpu_memory_bytes
from backends.jax.model import Params
from backends.jax.open_model import open_model
from backends.jax.program_store import ProgramStore
from backends.jax.result import DispatchedStep
from backends.jax.sharding import create_mesh, sharding
from backends.jax.slots import SlotTables, new_slot_tables, slot_row, write_slot
from backends.jax.step import DeviceState, StepShape
from engine.backend import Backend, BackendInfo, HostPlace, PendingStep, Progress, no_progress
from engine.batch import SlotState, StepBatch
from engine.config import GIB, EngineConfig
from engine.kv_blocks import KVFormat, KVPayload, PendingBlocks

logger = logging.getLogger(__name__)

_KERNEL_NAMES: dict[Kernels, str] = {
    "native": "native kernels",
    "xla": "XLA",
    "pallas": "Pallas kernels",
    "library": "the JAX library's attention",
}


class JaxBackend(Backend):
    def __init__(self, config: EngineConfig, place: HostPlace | None = None) -> None:
        """`place` is this host's if the engine has several; then all of them make the same calls in the same order."""
        self._config = config
        self._place = place
        self._counter = CompilationCounter()
        self._programs: dict[StepShape, Any] = {}
        self._info: BackendInfo | None = None

    def load(self, progress: Progress = no_progress) -> BackendInfo:
        if self._info is not None:
            return self._info
        config = self._config
        check_hardware(config)  # at once; a model may have to be downloaded
        model, checkpoint = open_model(config)
        hardware = select_platform(config, self._place)
        devices = engine_devices(config.tensor_parallel_size, config.num_hosts)
        enable_persistent_cache(cache_dir(config), devices)
        kernels = choose_kernels(config, model, hardware.platform)
        deployment = Deployment(config, model, create_mesh(devices), kernels=kernels).supported()
        plan = agree_on_plan(deployment.plan(self._memory_per_device(hardware)), config.num_hosts)
        self._deployment = deployment = deployment.within(plan)
        self._exchange = KVExchange(deployment)
        info = self._describe(plan)
        deployment.buckets  # noqa: B018 - refuses too many programs before weights are read
        self._params: Params = ParameterLoader(deployment.layout, checkpoint, progress).load()
        self._allocate(plan, progress)
        everywhere = sharding(deployment.mesh)
        self._write_slot = jax.jit(write_slot, donate_argnums=(0, 1), in_shardings=everywhere, out_shardings=everywhere)
        self._info = info
        if not config.warmup:
            self._counter.arm()
        return info

    def _memory_per_device(self, hardware: Hardware) -> int:
        """Bytes to plan with; simulated devices share the host's."""
        if hardware.memory_bytes is None:
            return cpu_memory_bytes(self._config) // self._config.tensor_parallel_size
        asked = self._config.device_memory_gib
        return hardware.memory_bytes if asked is None else int(asked * GIB)

    def _describe(self, plan: KVPlan) -> BackendInfo:
        config, deployment = self._config, self._deployment
        kernels = _KERNEL_NAMES[deployment.kernels]
        weights = f", {config.quantization} weights" if config.quantization else ""
        hosts = f" on {config.num_hosts} hosts" if config.num_hosts > 1 else ""
        return BackendInfo(
            device=f"{deployment.platform} x{deployment.chips}{hosts} ({deployment.dtype}{weights}, {kernels})",
            vocab_size=deployment.model.vocab_size,
            eos_token_ids=deployment.model.eos_token_ids,
            max_model_len=deployment.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            bytes_per_block=deployment.kv_bytes_per_block_per_device * deployment.chips,
            max_step_tokens=deployment.max_step_tokens,
            max_step_rows=config.max_decode_seqs,
            max_prefill_rows=config.max_prefill_seqs or config.max_decode_seqs,
            capabilities=deployment.capabilities,
        )

    def _allocate(self, plan: KVPlan, progress: Progress) -> None:
        deployment, blocks = self._deployment, plan.num_blocks
        size = blocks * deployment.kv_bytes_per_block_per_device * deployment.chips
        detail = f"{blocks * self._config.block_size} tokens, {size / GIB:.2f} GiB"
        progress("allocating KV blocks", 0, blocks, detail)
        self._state: DeviceState = zeros(deployment.state_shapes(blocks))
        new_tables = partial(new_slot_tables, self._config.max_decode_seqs, deployment.capabilities)
        self._tables: SlotTables = jax.jit(new_tables, out_shardings=sharding(deployment.mesh))()
        jax.block_until_ready(self._state.cache)
        logger.info("KV cache: %d blocks, %s (%d bytes)", blocks, detail, size)
        progress("allocating KV blocks", blocks, blocks, detail)

    def compile(self, progress: Progress = no_progress) -> None:
        if not self._config.enable_jit:
            return
        shapes = self._deployment.step_shapes
        started, cached_before = time.monotonic(), self._counter.cached
        store = self._program_store()
        lowered = ((shape, partial(self._lower, shape)) for shape in shapes)
        obtain = store.load_or_compile if store else compile_program
        self._programs = dict(compile_all(lowered, len(shapes), os.cpu_count() or 1, progress, obtain))
        cached = self._counter.cached - cached_before + (store.loaded if store else 0)
        seconds = time.monotonic() - started
        logger.info("%d programs ready in %.1f s, %d of them from the cache", len(shapes), seconds, cached)

    def warmup(self, progress: Progress = no_progress) -> None:
        shapes = self._deployment.step_shapes
        if not self._programs:
            self.compile(progress)
        for done, shape in enumerate(shapes, start=1):
            self._run(idle_batch(), shape).result()
            progress("running each program once", done, len(shapes))
        self._apply(SlotState(slot=self._config.max_decode_seqs, token_ids=np.zeros(0, np.int32)))
        if self._config.exchanges_kv:
            self._replace_cache(self._exchange.warm_up(self._state.cache))
        self._counter.arm()

    def _program_store(self) -> ProgramStore | None:
        """What `sliceserve compile` left for these devices, if it did."""
        folder = cache_dir(self._config)
        if folder is None or self._config.num_hosts > 1 or not programs_dir(folder).is_dir():
            return None
        return ProgramStore(programs_dir(folder), self._deployment.mesh.devices.flat)

    def _lower(self, shape: StepShape) -> jax.stages.Lowered:
        return self._deployment.lower(shape, self._params, self._state, self._tables)

    def dispatch(self, batch: StepBatch) -> PendingStep:
        for state in batch.slot_states:
            self._apply(state)
        return self._run(batch, self._deployment.buckets.choose(batch))

    def _apply(self, state: SlotState) -> None:
        row, history = slot_row(state, self._deployment.capabilities, self._state.history.shape[1])
        tables, new = self._write_slot(self._tables, self._state.history, np.int32(state.slot), row, history)
        self._tables = tables
        self._state = DeviceState(cache=self._state.cache, history=new)

    def _replace_cache(self, cache: jax.Array) -> None:
        self._state = DeviceState(cache=cache, history=self._state.history)

    def _run(self, batch: StepBatch, shape: StepShape) -> PendingStep:
        packed = shape.pack(batch, dump_slot=self._config.max_decode_seqs)
        if not self._config.enable_jit:
            with jax.disable_jit():
                arguments = (self._params, self._state, self._tables, jax.numpy.asarray(packed))
                outputs = self._deployment.step(shape)(*arguments)
        else:
            program = self._programs.get(shape)
            if program is None:  # warmup=false: compile what is needed when it is needed
                program = self._programs[shape] = compile_program(self._lower(shape))
            outputs = program(self._params, self._state, self._tables, packed)
        self._state, result, prompt = outputs
        wants_logprobs = bool((batch.sampling.num_logprobs >= 0).any())
        return DispatchedStep(batch, result, prompt if batch.prompt_logprobs.any() else None, wants_logprobs)

    def kv_format(self) -> KVFormat:
        return self._exchange.format

    def kv_heads(self) -> range:
        return self._exchange.own_heads

    def read_blocks(self, block_ids: Sequence[int], num_tokens: int, offset: int = 0) -> PendingBlocks:
        return self._exchange.read(self._state.cache, block_ids, num_tokens, offset)

    def write_blocks(self, block_ids: Sequence[int], offset: int, payload: KVPayload) -> None:
        self._replace_cache(self._exchange.write(self._state.cache, block_ids, offset, payload))

    @property
    def compilations_after_warmup(self) -> int:
        return self._counter.count

    def close(self) -> None:
        self._counter.close()
        self._programs.clear()
        for name in ("_state", "_tables", "_params"):
            with contextlib.suppress(AttributeError):
                delattr(self, name)


def zeros(shapes: Any) -> Any:
    """Arrays of zeros for a tree of ShapeDtypeStructs with shardings, made on the devices."""
    make = jax.jit(
        lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes),
        out_shardings=jax.tree.map(lambda x: x.sharding, shapes),
    )
    return make()
