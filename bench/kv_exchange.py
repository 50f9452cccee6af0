"""How fast KV leaves a cache and comes into another one, against copying the same bytes.

    python -m bench.kv_exchange [--chips 2]

Reads a chunk's blocks out of one cache (dispatch to contiguous host array) and writes them into another, for caches of
SmolLM2 and of an 8B model (fewer layers, so that they fit). The last column is numpy's copy of the same bytes. All of
them take turns, so that a busy machine slows all; medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import jax
import numpy as np

from backends.jax.backend import zeros
from backends.jax.compilation import default_cache_dir
from backends.jax.deployment import Deployment
from backends.jax.kernels import Kernels
from backends.jax.kv_exchange import KVExchange
from backends.jax.model_config import ModelConfig, read_model_config
from backends.jax.native import load_kernels
from backends.jax.sharding import create_mesh
from cluster.plan.models import open_model_config
from engine.config import DEMO_MODEL, EngineConfig
from engine.kv_blocks import LocalPayload
from engine.model_files import locate_model

TOKENS = 1024
ROUNDS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    model: ModelConfig
    kernels: Kernels


def cases() -> list[Case]:
    smol = read_model_config(locate_model(DEMO_MODEL, weights=False))
    large = replace(open_model_config("meta-llama/Llama-3.1-8B"), num_layers=8)
    kernels: tuple[Kernels, ...] = ("native", "xla")
    return [
        Case(name=name, model=model, kernels=kind)
        for name, model in (("SmolLM2-135M", smol), ("Llama-3.1-8B, 8 of 32 layers", large))
        for kind in kernels
    ]


def measure(case: Case, chips: int) -> dict[str, float]:
    """GB/s of each operation."""
    config = EngineConfig.from_args({"tensor_parallel_size": chips, "max_model_len": 2048, "backend": "cpu"})
    deployment = Deployment(config, case.model, create_mesh(jax.devices()[:chips]), kernels=case.kernels)
    exchange = KVExchange(deployment)
    count = TOKENS // config.block_size
    blocks = np.random.default_rng(0).permutation(2 * count)[:count].tolist()
    source, target = (zeros(deployment.state_shapes(2 * count)).cache for _ in range(2))
    source, target = exchange.warm_up(source), exchange.warm_up(target)
    shares = exchange.read(source, blocks, TOKENS, 0).result()
    size = sum(share.data.nbytes for share in shares)

    def read() -> None:
        exchange.read(source, blocks, TOKENS, 0).result()

    def write() -> None:
        nonlocal target
        target = jax.block_until_ready(exchange.write(target, blocks, 0, LocalPayload(blocks=shares)))

    def copy() -> None:
        for share in shares:
            share.data.copy()

    operations: dict[str, Callable[[], None]] = {"read": read, "write": write, "copy": copy}
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(ROUNDS):
        for name, operation in operations.items():
            started = time.perf_counter()
            operation()
            seconds[name].append(time.perf_counter() - started)
    return {name: size / median(each) / 1e9 for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--chips", type=int, default=1)
    chips = parser.parse_args().chips
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", chips)
    load_kernels(default_cache_dir())
    print(f"{TOKENS} tokens, bfloat16, {chips} chip(s), GB/s\n")
    print("| cache | layout | read | write | copy |\n|---|---|---|---|---|")
    for case in cases():
        speed = measure(case, chips)
        print(
            f"| {case.name} | {case.kernels} | "
            + " | ".join(f"{speed[n]:.2f}" for n in ("read", "write", "copy"))
            + " |"
        )


if __name__ == "__main__":
    main()
