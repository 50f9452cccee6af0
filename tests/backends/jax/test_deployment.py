"""What a deployment says before any array exists, and loading what it says onto several devices."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from backends.jax.backend import zeros
from backends.jax.buckets import MAX_PROGRAMS
from backends.jax.checkpoint import Checkpoint
from backends.jax.deployment import Deployment
from backends.jax.idle import idle_batch
from backends.jax.kernels import choose_kernels
from backends.jax.loading import ParameterLoader
from backends.jax.model import Params
from backends.jax.open_model import open_model
from backends.jax.sharding import create_mesh, sharding
from backends.jax.slots import new_slot_tables
from backends.jax.topology import open_topology
from engine.backend import BackendError, no_progress
from engine.config import EngineConfig
from tests.backends.jax.configs import LLAMA_8B
from tests.backends.models import tiny_llama


@pytest.mark.parametrize("max_model_len", [2048, 131072])
@pytest.mark.parametrize("chips", [1, 4])
def test_a_default_tpu_deployment_has_at_most_40_programs(max_model_len: int, chips: int) -> None:
    devices = open_topology("v5e:2x2")[:chips]
    config = EngineConfig.from_args({"max_model_len": max_model_len, "tensor_parallel_size": chips})
    deployment = Deployment(config, LLAMA_8B, create_mesh(devices), kernels="pallas")
    shapes = deployment.step_shapes
    assert len(shapes) <= MAX_PROGRAMS == 40
    assert {s.rows for s in shapes if s.decode_only} == {8, 16, 32, 64, 128, 256}
    assert max(s.tokens for s in shapes) == deployment.max_step_tokens == 2048
    assert {s.blocks for s in shapes} == {max_model_len // config.block_size}  # ragged attention: no table widths


def test_weights_and_cache_are_counted_per_device() -> None:
    devices = open_topology("v5e:2x2")
    sizes = []
    for chips in (1, 4):
        config = EngineConfig.from_args({"max_model_len": 2048, "tensor_parallel_size": chips})
        deployment = Deployment(config, LLAMA_8B, create_mesh(devices[:chips]), kernels="xla")
        sizes.append((deployment.weight_bytes_per_device, deployment.kv_bytes_per_block_per_device))
    (whole, block), (quarter, quarter_block) = sizes
    parameters = 8_030_261_248
    assert whole == pytest.approx(2 * parameters, rel=1e-3)
    assert quarter == pytest.approx(whole / 4, rel=1e-2)
    assert quarter_block * 4 == block == 2 * 2 * 32 * 8 * 128 * 32


class Copied(Checkpoint):
    """A checkpoint whose tensors are arrays of their own, so that tracemalloc sees them."""

    def __init__(self, inner: Checkpoint) -> None:
        self.source, self.shapes, self._inner = inner.source, inner.shapes, inner

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes

    def num_bytes(self, name: str) -> int:
        return self._inner.num_bytes(name)

    def _read(self, name: str) -> Any:
        return np.array(self._inner.tensor(name))


def load(folder: Path, chips: int, **changes: Any) -> tuple[Deployment, Params]:
    config = EngineConfig.from_args(
        {"model": str(folder), "dtype": "float32", "tensor_parallel_size": chips, "max_running_seqs": 8}
    )
    model, checkpoint = open_model(config)
    deployment = Deployment(config, model, create_mesh(jax.devices()[:chips]), kernels="xla", **changes)
    return deployment, ParameterLoader(deployment.layout, Copied(checkpoint), no_progress).load()


def test_stacked_weights_arrive_in_the_shapes_and_places_that_the_deployment_said(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", num_heads=9, num_kv_heads=3, head_dim=16, hidden_size=72, num_layers=3)
    deployment, params = load(folder, 4, stacked=True)
    shapes = deployment.parameter_shapes()
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)
    _, unrolled = load(folder, 1, stacked=False)
    source = np.asarray(unrolled["layers"][2]["down"].data)  # [hidden, 128]
    parts = [np.asarray(s.data)[2] for s in params["layers"]["down"].data.addressable_shards]
    assert [part.shape for part in parts] == [(72, 32)] * 4
    assert (np.concatenate(parts, axis=1) == source).all()


def test_loading_holds_one_parameter_of_one_layer_in_host_memory(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_layers=6)
    load(folder, 2, stacked=True)  # compiles
    tracemalloc.start()
    load(folder, 2, stacked=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = 2 * 1024 * 256 * 4  # gate and up
    assert largest < peak < 3.5 * largest  # as read and as cut for the chips, of 6 layers


@pytest.mark.parametrize("share_tokens_from", [None, 1])
def test_stacked_layers_and_shared_tokens_give_the_same_step(tmp_path: Path, share_tokens_from: int | None) -> None:
    """The form that TPUs run, on simulated devices, against one device with unrolled layers."""
    folder = tiny_llama(tmp_path / "model", num_heads=8, num_kv_heads=2, head_dim=16, tie=True)
    results = []
    for chips, changes in ((1, {}), (4, {"stacked": True, "share_tokens_from": share_tokens_from})):
        deployment, params = load(folder, chips, **changes)
        state = zeros(deployment.state_shapes(8))
        tables = jax.device_put(new_slot_tables(8, deployment.capabilities), sharding(deployment.mesh))
        shape = next(s for s in deployment.step_shapes if s.tokens == 32 and not s.decode_only)
        packed = shape.pack(prompt_batch(20), dump_slot=8)
        program = deployment.lower(shape, params, state, tables).compile()
        _, result, prompt = program(params, state, tables, packed)
        results.append((np.asarray(result)[0, 0], np.asarray(prompt)[:20].view(np.float32)[:, 0]))
    (token, logprobs), (other_token, other_logprobs) = results
    assert token == other_token >= 0
    assert logprobs.min() < -1
    assert np.abs(logprobs - other_logprobs).max() < 1e-4


def prompt_batch(tokens: int) -> Any:
    """One row whose whole prompt is in the step, with log-probabilities wanted."""
    ids = np.random.default_rng(0).integers(3, 320, tokens + 1).astype(np.int32)
    count, on = np.full(1, tokens, np.int32), np.ones(1, np.bool_)
    idle = idle_batch()
    return replace(
        idle,
        token_ids=ids[:-1],
        positions=np.arange(tokens, dtype=np.int32),
        query_lens=count,
        kv_lens=count,
        samples=on,
        sampling=replace(idle.sampling, temperature=np.zeros(1, np.float32), prompt_len=count),
        prompt_logprobs=on,
        target_ids=ids[1:],
    )


@pytest.mark.parametrize(
    ("attention", "platform", "words"),
    [("jax", "cpu", "does not run on cpu"), ("pallas", "cpu", "native"), ("native", "tpu", "does not run on tpu")],
)
def test_kernels_of_other_hardware_are_refused(attention: str, platform: str, words: str) -> None:
    config = EngineConfig.from_args({"attention": attention})
    with pytest.raises(BackendError, match=words):
        choose_kernels(config, LLAMA_8B, platform)


def test_kernels_that_cannot_do_a_model_s_shapes_are_refused_if_asked_for_and_else_replaced() -> None:
    wide, mesh = replace(LLAMA_8B, head_dim=320), create_mesh(jax.devices()[:1])
    with pytest.raises(BackendError, match=r"attention=jax is not possible: .* heads of 128"):
        Deployment(EngineConfig(attention="jax"), wide, mesh, kernels="library").supported()
    assert Deployment(EngineConfig(), wide, mesh, kernels="pallas").supported().kernels == "xla"
    assert Deployment(EngineConfig(), LLAMA_8B, mesh, kernels="pallas").supported().kernels == "pallas"
