"""Whose KV it is: what must not be mixed has different spaces, and what may be shared has the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.prefix_store.identity import space_of
from engine.config import EngineConfig
from tests.cluster.prefix_store.kv import FORMAT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (folder / "a.safetensors").write_bytes(bytes(1000))
    (folder / "b.safetensors").write_bytes(bytes(2000))
    return folder


def space(model: Path, **options: Any) -> bytes:
    return space_of(EngineConfig.from_args({"model": str(model), **options}), FORMAT)


def test_the_same_model_elsewhere_and_under_other_serving_options_is_the_same(model: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    options = {"max_decode_seqs": 7, "tensor_parallel_size": 2, "served_model_name": "x", "num_blocks": 100}
    assert space(moved, **options) == space(model)


def change_a_weight(model: Path) -> None:
    content = bytearray((model / "b.safetensors").read_bytes())
    content[1234] ^= 1
    (model / "b.safetensors").write_bytes(content)


def change_the_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "rope_theta": 5.0}))


def leave_out_a_file(model: Path) -> None:
    (model / "a.safetensors").unlink()


@pytest.mark.parametrize("change", [change_a_weight, change_the_config, leave_out_a_file])
def test_other_weights_under_the_same_name_are_another_model(model: Path, change: Callable[[Path], None]) -> None:
    before = space(model)
    change(model)
    assert space(model) != before


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"sliding_window": 64},
        {"block_size": 16},
        {"max_model_len": 77},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"backend": "mock"},
    ],
)
def test_options_that_change_what_the_weights_compute_are_told_apart(model: Path, options: dict[str, Any]) -> None:
    assert space(model, **options) != space(model)


def test_another_layout_of_heads_is_told_apart(model: Path) -> None:
    config = EngineConfig(model=str(model))
    assert space_of(config, FORMAT) != space_of(config, replace(FORMAT, dtype="float32"))


def test_dummy_weights_are_told_apart_by_their_seed(model: Path) -> None:
    assert space(model, load_format="dummy", seed=1) != space(model, load_format="dummy", seed=2)


def test_the_hubs_own_digests_are_taken_for_its_files(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(blobs / "abc")  # not even there: its name says what it holds
    first = space(snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blobs / "abd")
    assert space(snapshot) != first
