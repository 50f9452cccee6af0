"""Weight-only int8: rounding against its formula, products against float64, and whole models against the same weights
kept in float32."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.jax import native
from backends.jax.checkpoint.dummy import DummyCheckpoint
from backends.jax.compilation import default_cache_dir
from backends.jax.deployment import Deployment
from backends.jax.kernels import Kernels
from backends.jax.loading import ParameterLoader
from backends.jax.model_config import ModelConfig
from backends.jax.native.build import BuildError
from backends.jax.open_model import open_model
from backends.jax.partition import Partition
from backends.jax.quantize import dequantize_rows, quantize_rows
from backends.jax.sharding import create_mesh
from backends.jax.storage import Int8Storage, PackedInt8Storage
from backends.jax.weights import PackedInt8Weight, QuantizedWeight
from engine.backend import BackendError, no_progress
from engine.config import ConfigError, EngineConfig
from engine.request import SamplingParams
from tests.backends.jax.engine import Answer, engine, prompt_logits
from tests.backends.models import tiny_llama

GROUP = 256
"""Activations that share a scale where they are rounded (kGroup in linear_int8.h)."""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    try:
        native.load_kernels(default_cache_dir())
    except BuildError as error:
        pytest.skip(f"no native kernels on this machine: {error}")


def random_matrix(rng: np.random.Generator, out: int, inner: int) -> Any:
    """Channels of very different sizes, one of them zero, some values far from the rest."""
    matrix = rng.standard_normal((out, inner), np.float32) * np.exp(rng.uniform(-20, 20, (out, 1))).astype(np.float32)
    matrix[rng.integers(0, out), :] = 0
    matrix[:, rng.integers(0, inner)] *= 30
    return matrix


def packed_leaf(matrices: Any, layer: int, *, exact: bool) -> PackedInt8Weight:
    """A stack of matrices [layers, out, in], quantized and packed."""
    quantized = [quantize_rows(matrix) for matrix in matrices]
    return PackedInt8Weight(
        data=jnp.asarray(np.stack([native.pack_weight(data) for data, _ in quantized])),
        scale=jnp.asarray(np.stack([native.pack_scales(scale) for _, scale in quantized])),
        layer=jnp.int32(layer),
        out_features=matrices.shape[1],
        exact=exact,
    )


def xla_leaf(matrix: Any, dtype: str) -> QuantizedWeight:
    data, scale = quantize_rows(matrix)
    return QuantizedWeight(data=jnp.asarray(data), scale=jnp.asarray(scale), dtype=dtype)


def run_linear(leaf: Any, x: Any, rows: int) -> Any:
    return np.asarray(jax.jit(lambda leaf, x, n: leaf.linear(x, n))(leaf, x, jnp.array([rows], jnp.int32)))


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 70),
    inner=st.sampled_from([1, 2, 63, 576, 5000]),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_rounding_moves_no_weight_by_more_than_half_a_step(out: int, inner: int, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, out, inner)
    if dtype is np.float16:
        matrix = np.clip(matrix, -6e4, 6e4)
    matrix = matrix.astype(dtype)
    data, scale = quantize_rows(matrix)
    exact, steps = matrix.astype(np.float64), scale.astype(np.float64)[:, None]
    assert (data.dtype, scale.dtype) == (np.int8, np.float32)
    assert (np.abs(exact - data * steps) <= steps / 2 * (1 + 1e-5)).all()
    largest = np.abs(exact).max(axis=1)
    np.testing.assert_allclose(scale[largest > 1e-30], largest[largest > 1e-30] / 127, rtol=1e-6)
    assert (np.abs(data).max(axis=1)[largest > 1e-30] == 127).all(), "the largest weight takes the whole range"
    assert not dequantize_rows(data, scale)[largest == 0].any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    matrix = np.ones((3, 8), np.float32)
    matrix[1, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_rows(matrix)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    padding=st.integers(0, 3),
    out=st.sampled_from([1, 31, 32, 100, 257]),
    inner=st.sampled_from([2, 64, 256, 514, 1030]),
    layer=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_the_packed_product_equals_that_of_the_dequantized_weights(
    rows: int, padding: int, out: int, inner: int, layer: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrices = rng.standard_normal((3, out, inner), np.float32)
    x = rng.standard_normal((rows + padding, inner), np.float32)
    x[:, rng.integers(0, inner)] *= 300  # as language models' activations have them
    data, scale = quantize_rows(matrices[layer])
    weights = data.astype(np.float64) * scale.astype(np.float64)[:, None]
    expected = x[:rows].astype(np.float64) @ weights.T
    magnitudes = np.abs(x[:rows]).astype(np.float64) @ np.abs(weights).T
    exact = run_linear(packed_leaf(matrices, layer, exact=True), x, rows)
    summing = (inner + 3) * 2.0**-24 * magnitudes  # a float32 sum one by one, and the scale
    assert (np.abs(exact[:rows] - expected) <= summing).all()
    rounded = run_linear(packed_leaf(matrices, layer, exact=False), x, rows)
    half_steps = np.repeat(
        [np.abs(x[:rows, i : i + GROUP]).max(axis=1) / (2 * 32767) for i in range(0, inner, GROUP)], GROUP, axis=0
    ).T[:, :inner]
    assert (np.abs(rounded[:rows] - expected) <= half_steps * 1.01 @ np.abs(weights).T + summing).all()
    assert not exact[rows:].any()
    assert not rounded[rows:].any()


@pytest.mark.parametrize("exact", [True, False])
def test_a_rows_product_does_not_depend_on_the_other_rows(exact: bool) -> None:
    rng = np.random.default_rng(0)
    leaf = packed_leaf(rng.standard_normal((1, 96, 640), np.float32), 0, exact=exact)
    x = rng.standard_normal((64, 640), np.float32)
    together = run_linear(leaf, x, 64)
    for row in range(64):
        np.testing.assert_array_equal(run_linear(leaf, x[row : row + 1], 1)[0], together[row])


@pytest.mark.parametrize("exact", [True, False])
def test_activations_that_are_not_finite_show_in_their_row_only(exact: bool) -> None:
    rng = np.random.default_rng(0)
    leaf = packed_leaf(rng.standard_normal((1, 40, 300), np.float32), 0, exact=exact)
    x = rng.standard_normal((5, 300), np.float32)
    x[1, 7], x[3, 299], x[4] = np.nan, np.inf, 1e-38
    y = run_linear(leaf, x, 5)
    assert not np.isfinite(y[[1, 3]]).any()
    assert np.isfinite(y[[0, 2, 4]]).all()
    assert np.abs(y[4]).max() < 1e-30


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_xlas_product_equals_that_of_the_dequantized_weights(dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(3)
    matrix, x = rng.standard_normal((100, 576), np.float32), rng.standard_normal((9, 576), np.float32)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), xla_leaf(matrix * 2, dtype), xla_leaf(matrix, dtype))
    weights = dequantize_rows(*quantize_rows(matrix)).astype(np.float64)
    y = run_linear(stack.at_layer(jnp.int32(1)), x, 9)
    assert (np.abs(y - x @ weights.T) <= tolerance * (np.abs(x) @ np.abs(weights).T)).all()


def test_embedding_rows_come_back_dequantized() -> None:
    table = random_matrix(np.random.default_rng(1), 77, 6)
    ids = jnp.array([0, 31, 32, 76, 5])
    expected = dequantize_rows(*quantize_rows(table))[np.asarray(ids)]
    np.testing.assert_array_equal(xla_leaf(table, "bfloat16").take_rows(ids), expected)
    np.testing.assert_array_equal(packed_leaf(table[None], 0, exact=True).take_rows(ids), expected)


@pytest.mark.parametrize("storage", [Int8Storage, PackedInt8Storage])
def test_chips_hold_parts_of_what_one_chip_holds(storage: Any, folder: Path) -> None:
    """Padded heads, MLP columns and vocabulary; what a part stands for is that part of the dequantized matrix."""
    model, checkpoint = open_model(EngineConfig(model=str(folder)))
    model = replace(model, vocab_size=319)
    partition = Partition(model=model, chips=3, lanes=1)
    stored = storage(dtype=np.dtype(np.float32))
    cases = {
        "model.embed_tokens.weight": ("vocab", "hidden"),
        "model.layers.0.self_attn.o_proj.weight": ("hidden", "q_heads"),
        "model.layers.0.mlp.up_proj.weight": ("mlp", "hidden"),
    }
    for name, axes in cases.items():
        tensor = checkpoint.tensor(name)[: 319 if axes[0] == "vocab" else None]
        arrays = stored.encode(tensor)
        whole = dequantize_rows(arrays["data"], arrays["scale"])
        for chip in range(3):
            cut = {n: partition.cut(a, [axes[d] for d in stored.encoded_dims[n]], chip) for n, a in arrays.items()}
            out = partition.local_size(axes[0])
            ordered = {
                n: jnp.asarray(stored.order(n, a))[None if stored.always_stacked else ...] for n, a in cut.items()
            }
            assert {n: a.shape[stored.always_stacked :] for n, a in ordered.items()} == {
                n: a.shape for n, a in stored.stored((out, partition.local_size(axes[1]))).items()
            }
            rows = np.asarray(stored.leaf(ordered, out).take_rows(jnp.arange(out)))
            np.testing.assert_array_equal(rows, partition.cut(whole, axes, chip))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("int8") / "model", num_heads=4, num_kv_heads=2, intermediate_size=176)


@pytest.fixture(scope="module")
def dequantized(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with the weights that int8 stands for, in float32."""
    from safetensors.numpy import load_file, save_file

    other = tmp_path_factory.mktemp("dequantized")
    (other / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    rounded = {n: t if t.ndim == 1 else dequantize_rows(*quantize_rows(t)) for n, t in tensors.items()}
    save_file(rounded, other / "model.safetensors", metadata={"format": "pt"})
    return other


def small(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "num_blocks": 64, "max_running_seqs": 8, "warmup": False, **options}


PROMPTS = [np.random.default_rng(i).integers(3, 320, 5 + 20 * i).tolist() for i in range(3)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=0)


def prompt_logprobs(answer: Answer) -> list[float]:
    return [found.logprob for found in answer.prompt_logprobs or () if found is not None]


@pytest.fixture(scope="module")
def expected(dequantized: Path) -> list[Answer]:
    with engine(**small(dequantized)) as running:
        return running.run(PROMPTS, GREEDY)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.2)])
def test_a_quantized_model_is_the_model_with_rounded_weights(
    folder: Path, expected: list[Answer], dtype: str, tolerance: float
) -> None:
    with engine(**small(folder, quantization="int8", dtype=dtype)) as running:
        assert "int8 weights" in running.info.device
        together = running.run(PROMPTS, GREEDY)
        alone = running.run(PROMPTS[1:2], GREEDY)
    assert together[1].token_ids == alone[0].token_ids
    for ours, theirs in zip(together, expected, strict=True):
        np.testing.assert_allclose(prompt_logprobs(ours), prompt_logprobs(theirs), atol=tolerance)
        if dtype == "float32":
            assert ours.token_ids == theirs.token_ids


def test_so_it_is_without_native_kernels(folder: Path, expected: list[Answer]) -> None:
    with engine(**small(folder, quantization="int8", attention="xla")) as running:
        (found,) = running.run(PROMPTS[:1], replace(GREEDY, max_tokens=1))
    np.testing.assert_allclose(prompt_logprobs(found), prompt_logprobs(expected[0]), atol=2e-5)


@pytest.mark.parametrize(("kernels", "leaf"), [("native", PackedInt8Weight), ("xla", QuantizedWeight)])
def test_planned_weight_bytes_are_those_of_the_loaded_arrays(folder: Path, kernels: Kernels, leaf: type) -> None:
    model, checkpoint = open_model(EngineConfig(model=str(folder)))
    mesh = create_mesh(jax.local_devices()[:1])
    quantized, full = (
        Deployment(EngineConfig(model=str(folder), quantization=q), model, mesh, kernels=kernels)
        for q in ("int8", None)
    )
    params = ParameterLoader(quantized.layout, checkpoint, no_progress).load()
    assert isinstance(params["embed"], leaf)
    assert quantized.weight_bytes_per_device == sum(array.nbytes for array in jax.tree.leaves(params))
    # A scale takes 4 bytes of a channel of 64 or more weights.
    assert 0.5 * full.weight_bytes_per_device < quantized.weight_bytes_per_device < 0.54 * full.weight_bytes_per_device


@pytest.mark.parametrize("chips", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_several_chips_give_what_one_gives(tmp_path: Path, chips: int) -> None:
    """Heads, MLP columns and vocabulary that don't divide: padded channels change nothing."""
    sizes: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 16, "hidden_size": 72, "vocab_size": 333}
    model = tiny_llama(tmp_path / "model", intermediate_size=101, attention_bias=True, **sizes)
    logits, tokens = {}, {}
    for size in (1, chips):
        with engine(**small(model, quantization="int8", tensor_parallel_size=size)) as running:
            logits[size] = prompt_logits(running.backend, PROMPTS[1])
            tokens[size] = [answer.token_ids for answer in running.run(PROMPTS[:2], GREEDY)]
    np.testing.assert_allclose(logits[chips], logits[1], atol=1e-4)
    assert tokens[chips] == tokens[1]


def test_a_tensor_that_cannot_be_quantized_is_named(folder: Path) -> None:
    class Broken(DummyCheckpoint):
        def _read(self, name: str) -> Any:
            tensor = super()._read(name)
            return tensor * np.float32(np.nan) if name.endswith("1.mlp.up_proj.weight") else tensor

    config = EngineConfig(model=str(folder), quantization="int8")
    model, _ = open_model(config)
    layout = Deployment(config, model, create_mesh(jax.local_devices()[:1]), kernels="xla").layout
    with pytest.raises(BackendError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight .* not finite"):
        ParameterLoader(layout, Broken(model, 0), no_progress).load()


@pytest.fixture
def wide() -> ModelConfig:
    model, _ = open_model(EngineConfig(model="smollm2"))
    return replace(model, num_layers=6, vocab_size=64, hidden_size=512, intermediate_size=2048)


def test_the_host_holds_one_matrix_at_a_time(wide: ModelConfig) -> None:
    config = EngineConfig(model="smollm2", quantization="int8", attention="xla")
    deployment = Deployment(config, wide, create_mesh(jax.local_devices()[:1]), kernels="xla", stacked=True)
    checkpoint = DummyCheckpoint(wide, 0)
    largest = 2048 * 512
    tracemalloc.start()
    try:
        params = ParameterLoader(deployment.layout, checkpoint, no_progress).load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # gate and up as bfloat16 once and as int8 twice, and the float32 rows being rounded; XLA's own arrays don't count.
    assert peak < 2 * largest * (2 + 2) + (12 << 20) < total


def test_an_unknown_quantization_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^quantization='int4': input should be 'int8'$"):
        EngineConfig.from_args({"quantization": "int4"})
    assert EngineConfig.from_args({"quantization": "none"}).quantization is None
