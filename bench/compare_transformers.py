"""Ours through HTTP against transformers' `generate` in a process of its own, in one run: a table with ratios.

    python -m bench.compare_transformers

transformers gets its best case: no HTTP, all sequences of a level in one static batch, equal lengths. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from bench.make_hf_model import convert, demo_gguf
from bench.peers import LEVELS, measure, running, sliceserve
from cluster.cli.bench.report import align

RESULTS = Path(__file__).parent / "results"


class Transformers:
    """A model in this process."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def tokens_per_s(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        """Output tokens per second of one batch of random prompts, prefill included."""
        rng = random.Random(batch)
        rows = [[rng.randrange(1000, 32000) for _ in range(prompt_tokens)] for _ in range(batch)]
        ids = self._torch.tensor(rows)
        begin = time.perf_counter()
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_tokens,
                max_new_tokens=output_tokens,
            )
        seconds = time.perf_counter() - begin
        return float(batch * (output.shape[1] - prompt_tokens) / seconds)


def comparison(ours: list[dict[str, Any]], theirs: list[float]) -> str:
    """The table."""
    rows = [["concurrent", "ours tok/s", "transformers tok/s", "ratio"]]
    for mine, other in zip(ours, theirs, strict=True):
        rate = mine["output_tokens_per_s"]
        rows.append([mine["level"], f"{rate:.1f}", f"{other:.1f}", f"{rate / other:.2f}"])
    return align(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS), help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--port", type=int, default=7090)
    parser.add_argument("--output", type=Path, default=RESULTS / "transformers.json")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    model = RESULTS / "smollm2-bfloat16"
    convert(demo_gguf(), model, "bfloat16")
    lengths = {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    peer = sliceserve(model, args.port)
    with running(peer, start_deadline_s=900):
        ours = measure(peer, args.levels, rounds=2, **lengths)
    reference = Transformers(model)
    theirs = []
    for level in args.levels:
        theirs.append(reference.tokens_per_s(level, **lengths))
        print(f"transformers: {level:3d} at a time: {theirs[-1]:8.1f} output tokens/s", flush=True)
    print(f"\n{comparison(ours, theirs)}")
    args.output.write_text(json.dumps({"sliceserve": ours, "transformers": theirs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
