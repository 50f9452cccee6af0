"""Whole decode steps with int8 weights, compiled for TPU slices: HBM is read for each chip's packed bytes, once."""

from __future__ import annotations

import pytest

from backends.jax.aot import compile_step, open_deployment
from backends.jax.sharding import bytes_per_device
from engine.config import EngineConfig
from tests.backends.jax.configs import LLAMA_8B

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'")


@pytest.mark.parametrize(("topology", "chips"), [("v5e:2x2", 4), ("v6e:1x1", 1), ("v5p:2x2x1", 2), ("tpu7x:1x1x1", 2)])
def test_a_decode_step_reads_its_share_of_the_packed_weights_once(topology: str, chips: int) -> None:
    config = EngineConfig(quantization="int8", tensor_parallel_size=chips, max_model_len=2048, max_running_seqs=8)
    deployment = open_deployment(config, LLAMA_8B, topology)
    report = compile_step(deployment, next(s for s in deployment.step_shapes if s.decode_only), num_blocks=64)
    embedding = bytes_per_device(deployment.parameter_shapes()["embed"])  # of which a step takes a few rows
    # v5p keeps more of the activations in HBM than the others: 2.2 %.
    assert report.hbm_bytes == pytest.approx(deployment.weight_bytes_per_device - embedding, rel=0.03)
    assert report.temp_bytes < 0.01 * deployment.weight_bytes_per_device
