"""What int8 weights gain on CPU: the native linear kernels over bfloat16 and int8, at the rows that decoding has.

    python -m bench.int8_linear

One layer's four products and the output projection, each read from memory anew as in a step; all variants take turns,
so that a busy machine slows all of them. Prints a Markdown table: the time of bfloat16 and the ratios to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from backends.jax import native
from backends.jax.compilation import default_cache_dir
from backends.jax.quantize import quantize_rows
from backends.jax.weights import PackedInt8Weight, PackedWeight

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
COLD_BYTES = 512 << 20
"""The bfloat16 copies of a matrix together; more than a shared cache gives one guest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    name: str
    matrices: tuple[tuple[int, int], ...]  # [out, in]


MODELS = {
    "smollm2": Model(name="SmolLM2-135M", matrices=((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))),
    "1b": Model(name="Llama-3.2-1B", matrices=((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))),
}

Weights = Mapping[str, PackedWeight | PackedInt8Weight]


def make_weights(out: int, inner: int) -> tuple[Weights, int]:
    """The same random matrix in all storages, as often as makes it cold; and how often that is."""
    matrix = np.random.default_rng(0).standard_normal((out, inner), np.float32)
    copies = max(1, min(32, COLD_BYTES // (2 * matrix.size)))
    data, scale = quantize_rows(matrix)

    def stack(packed: np.ndarray) -> jax.Array:
        return jnp.asarray(np.broadcast_to(packed, (copies, *packed.shape)))

    int8 = PackedInt8Weight(
        data=stack(native.pack_weight(data)), scale=stack(native.pack_scales(scale)), out_features=out, exact=True
    )
    dense = stack(native.pack_weight(matrix.astype(ml_dtypes.bfloat16)))
    return {
        "bfloat16": PackedWeight(data=dense, out_features=out),
        "int8, exact": int8,
        "int8, rounded": replace(int8, exact=False),
    }, copies


def measure(weights: Weights, copies: int, inner: int, rows: int, rounds: int) -> dict[str, float]:
    """Median seconds of one product, per storage."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, inner), np.float32))
    count = jnp.array([rows], jnp.int32)

    @jax.jit
    def product(leaf: PackedWeight | PackedInt8Weight, layer: jax.Array) -> jax.Array:
        return leaf.at_layer(layer).linear(x, count)

    layers = [jnp.int32(i) for i in range(copies)]
    runs: dict[str, Callable[[int], jax.Array]] = {
        name: lambda i, leaf=leaf: product(leaf, layers[i % copies]) for name, leaf in weights.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run(i).block_until_ready()
            if i:
                times[name].append(time.perf_counter() - started)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="whose matrices")
    parser.add_argument("--rounds", type=int, default=25, help="products per storage and number of rows")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # libtpu may be installed, as a compiler
    native.load_kernels(default_cache_dir())
    totals: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}
    for out, inner in MODELS[args.model].matrices:
        weights, copies = make_weights(out, inner)
        for rows, sums in totals.items():
            for name, seconds in measure(weights, copies, inner, rows, args.rounds).items():
                sums[name] = sums.get(name, 0.0) + seconds
    print(
        f"{MODELS[args.model].name}\n\n| rows | bfloat16, ms | int8, exact | int8, rounded |\n| --- | --- | --- | --- |"
    )
    for rows, sums in totals.items():
        base = sums.pop("bfloat16")
        print(f"| {rows} | {base * 1e3:.2f} | " + " | ".join(f"{base / s:.2f}x" for s in sums.values()) + " |")


if __name__ == "__main__":
    main()
