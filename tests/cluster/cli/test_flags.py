from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cluster.cli.flags import FlagError, FlagParser, add_config_flags, given
from cluster.cli.main import main
from engine.config import EngineConfig


def config(*argv: str) -> EngineConfig:
    parser = FlagParser("test", "")
    add_config_flags(parser)
    return EngineConfig.from_args(given(parser.parse(argv)))


def test_no_flags_give_the_defaults() -> None:
    assert config() == EngineConfig()


@pytest.mark.parametrize(
    "argv", [["--max_model_len=99"], ["--max_model_len", "99"], ["--max-model-len=99"], ["--max-model_len", "99"]]
)
def test_values_with_equals_or_space_underscores_or_dashes(argv: list[str]) -> None:
    assert config(*argv).max_model_len == 99


@pytest.mark.parametrize("name", ["warmup", "enable_prefix_cache_hbm", "enable_chunked_prefill"])
def test_every_spelling_of_a_boolean(name: str) -> None:
    dashed = name.replace("_", "-")
    for off in (f"--no-{dashed}", f"--no_{name}", f"--no{name}", f"--{name}=false", f"--{dashed}=False"):
        assert getattr(config(off), name) is False, off
    for on in (f"--{name}", f"--{dashed}", f"--{name}=true"):
        assert getattr(config(f"--no-{dashed}", on), name) is True, on


def test_dashes_in_values_stay() -> None:
    assert config("--model=my-org/my-model").model == "my-org/my-model"
    assert config("--served-model-name", "a-b").served_model_name == "a-b"


def test_every_option_of_the_engine_is_a_flag() -> None:
    parser = FlagParser("test", "")
    add_config_flags(parser)
    text = parser.format_help()
    for name in EngineConfig.model_fields:
        assert f"--{name} " in text


def test_alias_and_name_of_one_option_must_agree() -> None:
    assert config("--max_running_seqs=7").max_decode_seqs == 7
    with pytest.raises(ValueError, match="given twice"):
        config("--max_running_seqs=7", "--max_decode_seqs=8")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modellen=9"], "unknown flag --max_modellen: did you mean --max_model_len?"),
        (["--zzzzzz"], "unknown flag --zzzzzz: see test --help"),
        (["model"], "unexpected argument 'model': options are given as --name=value"),
        (["--model"], "argument --model: expected one argument"),
    ],
)
def test_wrong_flags_are_one_line_with_advice(argv: list[str], message: str) -> None:
    with pytest.raises(FlagError) as error:
        config(*argv)
    assert str(error.value) == message


def test_a_command_line_of_hex_llm_works_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def run(config: EngineConfig, **network: Any) -> int:
        called.update(config=config, **network)
        return 0

    monkeypatch.setattr("cluster.cli.serve.run", run)
    line = (
        "--host=0.0.0.0 --port=7080 --model=google/gemma-2-9b-it --data_parallel_size=1 --tensor_parallel_size=1 "
        "--num_hosts=1 --hbm_utilization_factor=0.8 --max_running_seqs=128 --max_model_len=4096 "
        "--enable_prefix_cache_hbm"
    )
    assert main(["serve", *line.split()]) == 0
    assert (called["host"], called["port"]) == ("0.0.0.0", 7080)
    assert called["config"] == EngineConfig(
        model="google/gemma-2-9b-it", hbm_utilization_factor=0.8, max_running_seqs=128, max_model_len=4096
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--port=0"],
        ["serve", "--port=http"],
        ["serve", "--warmup=perhaps"],
        ["serve", "--block_size=7"],
        ["serve", "--wramup"],
        ["bench", "--rate=-1"],
        ["bench", "--slo=speed=3"],
        ["bench", "--plot=x.pdf"],
        ["bench", "--endpoint=chat"],
        ["bench", "--dataset=missing.jsonl"],
        ["bench", "--prompt_tokens=8", "--shared_prefix_tokens=9"],
        ["bench", "--extra=[]"],
        ["bench", "--url=ftp://x"],
        ["chat", "--tempratur=1"],
        ["frobnicate"],
    ],
)
def test_wrong_command_lines_exit_2_with_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sliceserve")
    assert captured.err.count("\n") == 1


def test_help_needs_no_heavy_import() -> None:
    code = "import sys, cluster.cli.main as m; m.main(['--help']); print(*{'ray', 'jax', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip("\n ").endswith("prints the version.")


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sliceserve 0.")
