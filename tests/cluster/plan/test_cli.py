"""`sliceserve plan` from the command line to its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import main
from cluster.plan.models import open_model_config, shipped_models
from engine.config import EngineConfig

CONFIG = json.loads((shipped_models()["meta-llama/Llama-3.2-1B"] / "config.json").read_text())
ON_V5E = ("--topology=v5e:2x4", "--no-compile")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_config(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_report_says_what_fits_and_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", *ON_V5E, "--max_model_len=4096")
    assert code == 0
    for expected in ("weights", "KV cache", "largest safe max_running_seqs", "limit", "bound", "expected", "assumed"):
        assert expected in out
    command = next(line for line in out.splitlines() if line.startswith("server: sliceserve serve "))
    flags = dict(word.removeprefix("--").split("=") for word in command.split()[3:])
    EngineConfig.from_args(flags)  # only options that the server takes


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", *ON_V5E, "--max_model_len=4096", "--json")
    assert code == 0
    report = json.loads(out)
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    for key in _keys(report):
        assert f"`{key}`" in page, key
    assert report["fits"] is True
    assert report["bounds"]["output_tokens_per_s"] > report["expected"]["output_tokens_per_s"] > 0
    assert report["topology"]["gke_node_selector"]["cloud.google.com/gke-tpu-topology"] == "2x4"


def _keys(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    free = ("ray_resources", "ray_labels", "gke_node_selector")
    return [key for name, inner in value.items() for key in (name, *([] if name in free else _keys(inner)))]


def test_a_folder_a_config_file_a_hub_id_and_a_gguf_file_are_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_config(tmp_path)
    reports = [
        json.loads(run(capsys, f"--model={model}", *ON_V5E, "--json")[1])
        for model in (folder, folder / "config.json", "meta-llama/Llama-3.2-1B-Instruct")
    ]
    assert len({report["memory_per_device"]["weight_bytes"] for report in reports}) == 1
    code, out, _ = run(capsys, "--model=smollm2", "--topology=v5e:2x2", "--no-compile", "--tensor_parallel_size=2")
    assert code == 0
    assert "of the heads that devices hold are copies or padding: 9 query and 3 KV heads over 2 devices" in out


def test_the_printed_command_repeats_the_options_that_were_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--block_size=8", "--max_num_batched_tokens=4096", "--sliding_window=2048", "--quantization=int8"]
    _, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", *ON_V5E, *asked, "--json")
    assert set(asked) < set(json.loads(out)["server_arguments"])
    _, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", *ON_V5E, "--json")
    assert not any("block_size" in flag or "batched" in flag for flag in json.loads(out)["server_arguments"])


def test_hosts_are_those_of_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    for tensor_parallel, hosts in ((16, "--num_hosts=4"), (8, "--num_hosts=2")):
        argv = ("--topology=v5e:4x4", "--no-compile", f"--tensor_parallel_size={tensor_parallel}", "--json")
        _, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", *argv)
        assert hosts in json.loads(out)["not_available_yet"]


def test_a_shorter_context_is_no_advice_if_the_workload_does_not_fit_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--model=llama-3.2-3b", "--topology=v5e:1x1", "--no-compile", "--max_model_len=131072")
    assert "with max_model_len=" in run(capsys, *argv)[2]
    assert "with max_model_len=" not in run(capsys, *argv, "--workload=in=70000,out=1000,concurrency=1")[2]


def test_neuron_instances_are_planned_for_memory(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model=meta-llama/Llama-3.1-8B", "--topology=inf2.24xlarge", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["bounds"] is None
    assert report["memory_per_device"]["usable_bytes"] == 16 << 30
    assert "--backend=neuron" in report["not_available_yet"]


def test_a_chart_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    assert run(capsys, "--model=meta-llama/Llama-3.1-8B", *ON_V5E, f"--chart={picture}")[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        *("--model=meta-llama/Llama-3.1-8B", "--search", "--topology=v5e,v6e:2x2", "--no-compile"),
        *("--workload=in=500,out=200,concurrency=32", "--slo=ttft=1s,tpot=40ms", "--max_chips=8", "--json"),
    )
    assert code == 0
    candidates = json.loads(out)["candidates"]
    assert 1 < len(candidates) <= 10
    assert {candidate["plan"]["topology"]["name"].split(":")[0] for candidate in candidates} == {"v5e", "v6e"}
    assert all(candidate["plan"]["expected"]["tpot_ms"] <= 40 for candidate in candidates)


def test_the_comparison_with_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--compare")
    assert code == 0
    assert "10873" in out


@pytest.mark.parametrize(
    "name",
    ["meta-llama/Llama-3.1-8B-Instruct", "llama-3.3-70b", "meta-llama/Llama-2-7b-chat-hf", "Mistral-7B-Instruct-v0.3"],
)
def test_hub_ids_and_their_variants_are_known(name: str) -> None:
    assert open_model_config(name).architecture == "llama"


def test_every_shipped_config_is_a_model_that_can_be_served() -> None:
    models = {name: open_model_config(name) for name in shipped_models()}
    assert len(models) >= 10


WRONG = [
    (("--topology=v5e:3x4", "--model=llama-3.1-8b"), 2, "v5e has v5e:2x2"),
    (("--topology=v5e:2x4",), 2, "--model is missing"),
    (("--model=llama-3.1-8b",), 2, "--topology is missing"),
    (("--modle=llama-3.1-8b",), 2, "did you mean --model?"),
    (("--model=llama-3.1-8b", *ON_V5E, "--workload=in=5"), 2, "out and concurrency missing"),
    (("--model=llama-3.1-8b", *ON_V5E, "--max_model_len=0"), 2, "greater than or equal to 1"),
    (("--model=llama-3.1-8b", *ON_V5E, "--quantization=int3"), 2, "int8"),
    (("--model=llama-3.1-8b", *ON_V5E, "--tensor_parallel_size=none"), 2, "not a whole number"),
    (("--model=llama-3.1-8b", *ON_V5E, "--slo=ttft=1s"), 2, "--slo is for --search"),
    (("--model=llama-3.1-8b", *ON_V5E, "--rank=throughput"), 2, "--rank is for --search"),
    (("--compare", "--json"), 2, "leave --json out"),
    (("--model=llama-3.1-8b", *ON_V5E, "--prices=/no/file.json"), 2, "can't be read: No such file"),
    (("--model=llama-3.1-8b", *ON_V5E, "--chart=plan.pdf"), 2, "ends in .png"),
    (("--model=llama-3.1-8b", "--topology=inf2.xlarge", "--chart=plan.png"), 2, "memory only"),
    (("--model=", *ON_V5E), 2, "--model is missing"),
    (("--model=llama-3.1-8b", "--search", "--topology="), 2, "--topology= is empty"),
    (("--model=llama-3.1-8b", *ON_V5E, "--hbm_utilization_factor=0.0001"), 1, "with hbm_utilization_factor=0.9"),
    (("--model=llama-3.1-8b", *ON_V5E, "--max_num_batched_tokens=999999"), 1, "with max_num_batched_tokens=2048"),
    (("--model=llama-3.1-8b", "--search", "--tensor_parallel_size=2"), 2, "--search varies it"),
    (("--model=llama-3.1-8b", "--search", "--topology=inf2.xlarge"), 2, "--search ranks TPU slices"),
    (("--model=llama-3.1-8b", "--search", "--topology=v5e:4x4", "--max_chips=4"), 2, "less than every slice"),
    (("--model=llama-9-8b", *ON_V5E), 1, "meta-llama/Llama-3.1-8B"),
    (("--model=/no/such/folder", *ON_V5E), 1, "use a folder with config.json"),
    (("--model=llama-3.1-8b", *ON_V5E, "--tensor_parallel_size=3"), 1, "tensor_parallel_size may be 1, 2, 4, 8"),
    (("--model=llama-3.1-8b", *ON_V5E, "--data_parallel_size=3"), 1, "does not divide the 8 devices"),
    (
        ("--model=llama-3.1-8b", *ON_V5E, "--tensor_parallel_size=2", "--data_parallel_size=2"),
        1,
        "with tensor_parallel_size=2 data_parallel_size is 4",
    ),
    (
        ("--model=llama-3.1-8b", "--topology=v5e:8x8", "--no-compile", "--tensor_parallel_size=64"),
        1,
        "32 attention heads, which can't be split; sizes that work on v5e:8x8: 1, 2, 4, 8, 16, 32",
    ),
    (
        ("--model=llama-3.1-70b", *ON_V5E),
        1,
        "on v5e:4x4 (tensor_parallel_size=16), or on v5e:2x4 with quantization=int8",
    ),
    (("--model=llama-3.1-70b", "--topology=inf2.xlarge"), 1, "it fits on inf2.24xlarge"),
    (("--model=llama-3.1-8b", "--topology=v5e:1x1", "--no-compile"), 1, "it fits on v5e:2x2"),
    (("--model=llama-3.1-8b", *ON_V5E, "--max_model_len=999999"), 1, "use 131072 or less"),
    (("--model=llama-3.1-8b", *ON_V5E, "--max_model_len=1500"), 1, "use in + out of 1500 or less"),
]


@pytest.mark.parametrize(
    ("argv", "code", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_what_is_wrong_is_one_line_that_says_what_would_work(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, says: str
) -> None:
    returned, out, err = run(capsys, *argv)
    assert returned == code
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


def test_json_tells_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model=llama-3.1-70b", *ON_V5E, "--json")
    report = json.loads(out)
    assert (code, report["fits"], err.count("\n")) == (1, False, 1)
    assert report["memory_per_device"]["missing_bytes"] > 2 << 30


def test_what_the_compiler_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no such kernel\nand much more")

    monkeypatch.setattr("backends.jax.aot.compile_step", refuse)
    code, out, err = run(capsys, "--model=llama-3.2-1b", "--topology=v5e:1x1", "--max_model_len=4096")
    assert (code, out) == (1, "")
    assert err.splitlines()[1:] == [
        "sliceserve plan: the step programs of llama-3.2-1b can't be made for v5e:1x1: no such kernel; "
        "--no-compile plans by formula"
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not supported; supported: Llama"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": 30}, "no multiple of num_key_value_heads"),
    ],
)
def test_a_wrong_config_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    code, out, err = run(capsys, f"--model={write_config(tmp_path, **changes)}", *ON_V5E)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert says in err


def test_a_config_that_is_no_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, _, err = run(capsys, f"--model={tmp_path}", *ON_V5E)
    assert code == 1
    assert "can't be read as JSON" in err
    assert err.count("\n") == 1


def test_a_missing_compiler_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.jax.topology.libtpu_is_installed", lambda: False)
    code, out, err = run(capsys, "--model=llama-3.2-1b", "--topology=v5e:1x1", "--max_model_len=4096")
    assert (code, out) == (1, "")
    assert "libtpu" in err.splitlines()[-1]
    assert "--no-compile plans by formula" in err.splitlines()[-1]


def test_a_plan_compiles_the_deployment_s_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_config(
        tmp_path,
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=512,
    )
    argv = (
        *(f"--model={folder}", "--topology=v6e:2x2", "--max_running_seqs=8", "--max_num_batched_tokens=64"),
        *("--workload=in=64,out=64,concurrency=8", "--json"),
    )
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    compiled, formula = json.loads(out), json.loads(run(capsys, *argv, "--no-compile")[1])
    assert (compiled["source"], formula["source"]) == ("compiled", "formula")
    for key in ("weight_bytes", "kv_bytes", "usable_bytes"):
        assert compiled["memory_per_device"][key] == formula["memory_per_device"][key]
    step, least = (report["roofline"]["decode_step"] for report in (compiled, formula))
    assert least["hbm_bytes"] <= step["hbm_bytes"] < 3 * least["hbm_bytes"]  # activations count in so small a model
    assert least["ici_bytes"] <= step["ici_bytes"] < 1.3 * least["ici_bytes"]
    assert err == "compiling for v6e:2x2 …\n"
