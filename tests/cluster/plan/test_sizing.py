"""Sizes by formula against sums done by hand, and against the decoder's own list of parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from backends.jax.model import parameters
from backends.jax.model_config import ModelConfig
from cluster.plan.costs import AnalyticCosts, sent_bytes
from cluster.plan.models import open_model_config
from cluster.plan.programs import formula_programs
from cluster.plan.roofline import Peaks
from cluster.plan.sizing import Shard, usable_tensor_parallel
from cluster.topology import TpuSlice, find_topology
from engine.config import GIB
from tests.cluster.plan.requests import plan

LLAMA_8B = open_model_config("meta-llama/Llama-3.1-8B")
LLAMA_70B = open_model_config("meta-llama/Llama-3.1-70B")
# What the models' cards say: 8.03 and 70.6 billion, norms included.
PARAMETERS_8B, NORMS_8B = 8_030_261_248, 65 * 4096
PARAMETERS_70B, NORMS_70B = 70_553_706_496, 161 * 8192


def shard(config: ModelConfig, tensor_parallel: int, quantization: str | None = None) -> Shard:
    return Shard(config=config, tensor_parallel=tensor_parallel, quantization=quantization)


@pytest.mark.parametrize(
    ("config", "count", "norms"), [(LLAMA_8B, PARAMETERS_8B, NORMS_8B), (LLAMA_70B, PARAMETERS_70B, NORMS_70B)]
)
def test_weights_on_one_device_are_the_model_s(config: ModelConfig, count: int, norms: int) -> None:
    """Matrices in bfloat16, norms in float32."""
    assert shard(config, 1).weight_bytes == 2 * (count - norms) + 4 * norms


@pytest.mark.parametrize(("tensor_parallel", "vocabulary"), [(2, 64128), (4, 32128), (8, 16128)])
def test_matrices_are_cut_evenly_and_the_vocabulary_to_whole_lanes(tensor_parallel: int, vocabulary: int) -> None:
    layers = PARAMETERS_8B - NORMS_8B - 2 * 128256 * 4096
    expected = 2 * (layers // tensor_parallel + 2 * vocabulary * 4096) + 4 * NORMS_8B
    assert shard(LLAMA_8B, tensor_parallel).weight_bytes == expected


def test_seventy_billion_over_sixteen_devices_copies_its_eight_kv_heads() -> None:
    part = shard(LLAMA_70B, 16)
    assert (part.query_heads, part.kv_heads) == (4, 1)
    layers = PARAMETERS_70B - NORMS_70B - 2 * 128256 * 8192
    copies = 80 * 8192 * 2 * 128 // 2  # keys and values of a head are on two devices: half of one device's is a copy
    assert part.weight_bytes == 2 * (layers // 16 + copies + 2 * 8064 * 8192) + 4 * NORMS_70B


def test_quantized_matrices_take_a_byte_and_their_scales() -> None:
    rows = 32 * ((32 + 2 * 8) * 128 + 4096 + 2 * 14336 + 4096) + 2 * 128256
    expected = PARAMETERS_8B - NORMS_8B + 4 * rows + 4 * NORMS_8B
    assert shard(LLAMA_8B, 1, "int8").weight_bytes == expected


@pytest.mark.parametrize(("config", "expected"), [(LLAMA_8B, 128 * 1024), (LLAMA_70B, 320 * 1024)])
def test_kv_cache_per_token(config: ModelConfig, expected: int) -> None:
    """2 x layers x 8 heads x 128 x 2 bytes."""
    assert shard(config, 1).kv_bytes_per_token == expected
    assert shard(config, 8).kv_bytes_per_token == expected // 8
    assert shard(config, 16).kv_bytes_per_token == expected // 8  # each head twice


def test_the_formula_counts_every_parameter_of_the_decoder() -> None:
    names = {parameter.name for parameter in parameters(LLAMA_8B)}
    assert names == {"embed", "input_norm", "qkv", "o", "post_norm", "gate_up", "down", "final_norm", "lm_head"}


def test_a_decode_step_reads_weights_but_the_embedding_and_all_keys() -> None:
    cost = AnalyticCosts(shard=shard(LLAMA_8B, 1)).decode(64, 1500)
    matrices = 2 * (PARAMETERS_8B - NORMS_8B - 128256 * 4096)
    assert cost.hbm_bytes == matrices + 64 * 4096 * 2 + 64 * 1501 * 128 * 1024
    products = 2 * 64 * (PARAMETERS_8B - NORMS_8B - 128256 * 4096)
    assert cost.flops == products + 64 * 4 * 1500 * 4096 * 32
    assert cost.ici_bytes == 0


def test_sums_send_twice_what_others_have() -> None:
    cost = AnalyticCosts(shard=shard(LLAMA_8B, 4)).decode(64, 1500)
    assert cost.ici_bytes == 65 * 64 * 4096 * 2 * 2 * 3 / 4
    assert sent_bytes("all-reduce", 1000, 8, devices_per_chip=2) == 2 * 1000 * 3 / 4 / 2  # four chips of two devices
    assert sent_bytes("all-gather", 1000, 4) == 750
    assert sent_bytes("collective-permute", 1000, 4) == 1000


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all", "collective-permute"])
def test_the_two_devices_of_a_chip_use_no_link(kind: str) -> None:
    assert sent_bytes(kind, 1000, 2, devices_per_chip=2) == 0


def test_a_window_bounds_what_is_read() -> None:
    costs = AnalyticCosts(shard=shard(replace(LLAMA_8B, sliding_window=1024), 1))
    assert costs.decode(8, 100_000) == costs.decode(8, 1024)


def test_a_device_of_tpu7x_is_half_a_chip() -> None:
    chosen = find_topology("tpu7x:2x2x1")
    assert isinstance(chosen, TpuSlice)
    assert Peaks.of(chosen).hbm_bytes_per_s == 3690e9
    assert plan("meta-llama/Llama-3.1-8B", "tpu7x:2x2x1").memory.usable_bytes == int(94.75 * GIB)


def test_capacity_of_seventy_billion_on_sixteen_v5e() -> None:
    memory = plan("meta-llama/Llama-3.1-70B", "v5e:4x4").memory
    left = int(15.75 * GIB * 0.9) - memory.weight_bytes - memory.other_bytes
    per_token = 2 * 80 * 128 * 2
    assert memory.kv_tokens == (left // (32 * per_token) - 1) * 32
    assert memory.kv_sequences == memory.num_blocks // 128
    assert memory.fits
    assert memory.safe_factor == math.floor((1 - memory.temporary_bytes / memory.usable_bytes - 0.01) * 100) / 100
    assert memory.safe_rows(plan("meta-llama/Llama-3.1-70B", "v5e:4x4").request.workload) == 72


def test_the_cache_is_no_larger_than_its_rows_can_use() -> None:
    memory = plan("meta-llama/Llama-3.2-1B", "v5p:2x2x1", max_rows=16).memory
    assert memory.kv_tokens == 16 * 4096


def test_biases_are_weights_too() -> None:
    biased = replace(LLAMA_8B, attention_bias=True, mlp_bias=True)
    biases = 4 * 32 * ((32 + 2 * 8) * 128 + 4096 + 2 * 14336 + 4096)
    assert shard(biased, 1).weight_bytes == shard(LLAMA_8B, 1).weight_bytes + biases


def test_heads_that_our_kernel_does_not_take_are_planned_as_the_server_caches_them() -> None:
    wide = replace(LLAMA_8B, head_dim=320)
    request = replace(plan("meta-llama/Llama-3.1-8B", "v5p:2x2x1").request, model=wide)
    assert formula_programs(request).kv_bytes_per_block == 2 * 32 * request.shard.kv_heads * 320 * 32 * 2


def test_devices_without_a_head_are_not_used() -> None:
    assert usable_tensor_parallel(LLAMA_8B, 64) == [1, 2, 4, 8, 16, 32]
    assert usable_tensor_parallel(LLAMA_8B, 12) == [1, 2, 3, 4, 6, 12]
