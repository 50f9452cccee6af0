"""Weights from safetensors, GGUF and nothing, compared with what transformers has; and every way files can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from backends.jax.checkpoint import Checkpoint, open_checkpoint
from backends.jax.model_config import RopeScaling, read_model_config
from engine.backend import BackendError
from engine.model_files import locate_model
from tests.backends.models import save_as_gguf, tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def open_model(path: Path | str, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    files = locate_model(str(path))
    return open_checkpoint(files, read_model_config(files), load_format, seed)


def reference(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors as transformers loads them, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def assert_same(checkpoint: Checkpoint, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert set(checkpoint.names()) == set(expected)
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), expected[name], err_msg=name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture(scope="module")
def tiny_gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_as_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_one_safetensors_file(tiny: Path) -> None:
    assert_same(open_model(tiny), reference(tiny))


def test_shards_ties_biases_and_bfloat16(tmp_path: Path) -> None:
    tiny_llama(
        tmp_path, num_kv_heads=4, tie=True, attention_bias=True, mlp_bias=True, dtype="bfloat16", max_shard_size="100KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_model(tmp_path, "safetensors")
    assert_same(checkpoint, reference(tmp_path))
    assert "lm_head.weight" not in checkpoint.names()
    assert {checkpoint.tensor(name).dtype for name in checkpoint.names()} == {np.dtype(ml_dtypes.bfloat16)}
    assert checkpoint.total_bytes == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())


def test_float16_stays_float16(tmp_path: Path) -> None:
    tiny_llama(tmp_path, dtype="float16")
    assert open_model(tmp_path).tensor("model.norm.weight").dtype == np.float16


@pytest.mark.parametrize("options", [{}, {"tie": True, "num_kv_heads": 4}, {"attention_bias": True, "mlp_bias": True}])
def test_gguf_gives_the_tensors_it_was_made_from(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = tiny_llama(tmp_path / "hf", **options)
    file = save_as_gguf(folder, tmp_path / "model.gguf")
    assert read_model_config(locate_model(str(file))) == read_model_config(locate_model(str(folder)))
    assert_same(open_model(file, "gguf"), {name: open_model(folder).tensor(name) for name in open_model(file).names()})


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantized_gguf_is_close(tiny: Path, tmp_path: Path, tensor_type: str) -> None:
    packed = open_model(save_as_gguf(tiny, tmp_path / "model.gguf", tensor_type=tensor_type))
    exact = open_model(tiny)
    for name in exact.names():
        original, restored = exact.tensor(name), packed.tensor(name)
        assert restored.dtype == np.float32
        assert np.abs(restored - original).max() <= (0.15 if tensor_type == "Q4_0" else 0.01) * np.abs(original).max()


def test_rope_scaling_survives_gguf(tmp_path: Path) -> None:
    for name, scaling in (("llama3", LLAMA3), ("linear", {"rope_type": "linear", "factor": 2.0})):
        folder = tiny_llama(tmp_path / name, rope_scaling=scaling)
        config = read_model_config(locate_model(str(save_as_gguf(folder, tmp_path / f"{name}.gguf"))))
        assert config.rope_scaling == read_model_config(locate_model(str(folder))).rope_scaling
        assert config.rope_scaling != RopeScaling()


def test_the_demos_gguf_is_what_transformers_dequantizes(demo_reference: Any) -> None:
    assert_same(open_model("smollm2"), {name: p.detach().numpy() for name, p in demo_reference.named_parameters()})


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 96,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            }
        )
    )
    first, again, other = (open_model(tmp_path, "dummy", seed) for seed in (0, 0, 1))
    for name in first.names():
        values = first.tensor(name)
        assert values.shape == first.shapes[name]
        np.testing.assert_array_equal(values, again.tensor(name))
        if "norm" not in name:
            assert np.any(values != other.tensor(name))
            assert 0 < values.astype(np.float32).std() < 0.1


# Wrong files


def refusal(path: Path, load_format: str = "auto") -> str:
    with pytest.raises(BackendError) as caught:
        open_model(path, load_format)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.3, 0.5, 0.999])
def test_a_truncated_safetensors_file(copy: Path, share: float) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    assert "model.safetensors is damaged or cut off" in refusal(copy)


def test_a_safetensors_file_that_is_something_else(copy: Path) -> None:
    (copy / "model.safetensors").write_text("<html>Not found</html>" * 100)
    assert "model.safetensors is damaged or cut off" in refusal(copy)


@pytest.mark.parametrize("share", [0.0, 0.00002, 0.0005, 0.002, 0.01, 0.3, 0.5, 0.999])
def test_a_gguf_file_cut_anywhere(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(tiny_gguf.read_bytes()[: int(tiny_gguf.stat().st_size * share)])
    message = refusal(file)
    assert "cut off" in message or "not a GGUF file" in message


def test_a_gguf_file_cut_at_every_byte_of_its_header(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    header_bytes = len(whole) - open_model(tiny_gguf).total_bytes
    file = tmp_path / "cut.gguf"
    for size in range(0, header_bytes, 7):
        file.write_bytes(whole[:size])
        refusal(file)


def test_a_damaged_gguf_header_is_one_line(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = bytearray(tiny_gguf.read_bytes())
    generator = np.random.default_rng(0)
    file = tmp_path / "damaged.gguf"
    for _ in range(200):
        damaged = bytearray(whole)
        for place in generator.integers(0, 1500, size=3):
            damaged[place] = generator.integers(0, 256)
        file.write_bytes(damaged)
        try:
            open_model(file)
        except BackendError as error:
            assert "\n" not in str(error)  # noqa: PT017 -- some damage is harmless


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file" in refusal(tmp_path / "model.gguf")


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight missing" in refusal(copy)


def test_a_missing_output_projection_mentions_ties(copy: Path) -> None:
    change_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    assert '"tie_word_embeddings": true' in refusal(copy)


def test_a_config_of_another_model(copy: Path) -> None:
    edit_config(copy, intermediate_size=160)
    assert "tensor model.layers.0.mlp.gate_proj.weight has shape [128, 64], the config asks for [160, 64]" in refusal(
        copy
    )


def test_more_layers_than_weights(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=3)
    assert "tensor model.layers.2.input_layernorm.weight and 8 more missing" in refusal(copy)


def test_an_unsupported_type(copy: Path) -> None:
    change_tensors(copy, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.int8)}))
    assert "tensor model.norm.weight is stored as I8; supported: F32, F16, BF16" in refusal(copy)


def test_a_missing_shard(tmp_path: Path) -> None:
    tiny_llama(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"shard {shard.name}, listed in model.safetensors.index.json, is missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_a_damaged_index(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(copy)


def test_pickled_weights_only(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "only pickled weights (.bin): convert them to safetensors" in refusal(copy)


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "holds no *.safetensors files" in refusal(copy)


def test_a_load_format_that_is_not_there(copy: Path, tiny_gguf: Path) -> None:
    assert "load_format=gguf, but" in refusal(copy, "gguf")
    assert "load_format=safetensors, but" in refusal(tiny_gguf, "safetensors")


def test_gguf_architectures_that_are_not_supported(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "GGUF architecture 'gpt2' is not supported; supported: llama" in refusal(tmp_path / "model.gguf")
