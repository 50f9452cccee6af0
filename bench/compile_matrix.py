"""The table of docs/tpu.md: models on slices, proven by the TPU compiler on any machine.

`python -m bench.compile_matrix docs/tpu.md` compiles every case and writes the table between the file's markers;
tests/tpu_compile asserts the same numbers (`make test-tpu-compile`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backends.jax.aot import ProgramReport, compile_step, open_deployment
from backends.jax.deployment import Deployment
from backends.jax.sharding import bytes_per_device
from backends.jax.step import StepShape
from cluster.plan.models import open_model_config
from cluster.topology import TpuSlice, find_topology
from engine.backend import BackendError
from engine.config import GIB, EngineConfig

ROWS = 64
CONTEXT = 1024
"""Of the decode step that is measured: sequences, and tokens that each attends to."""
MAX_MODEL_LEN = 4096
MARKERS = ("<!-- compile matrix: begin -->", "<!-- compile matrix: end -->")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    topology: str
    tensor_parallel: int
    quantization: Literal["int8"] | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.quantization or 'bf16'} on {self.topology} tp={self.tensor_parallel}"


CASES = (
    Case(model="Llama-3.2-1B", topology="v5e:1x1", tensor_parallel=1),
    Case(model="Llama-3.2-3B", topology="v5e:1x1", tensor_parallel=1),
    Case(model="Llama-3.2-1B", topology="v6e:1x1", tensor_parallel=1),
    Case(model="Llama-3.2-3B", topology="v6e:1x1", tensor_parallel=1),
    Case(model="Llama-3.1-8B", topology="v5e:2x2", tensor_parallel=4),
    Case(model="Llama-3.1-8B", topology="v5e:2x4", tensor_parallel=8),
    Case(model="Llama-3.1-8B", topology="v6e:2x2", tensor_parallel=4),
    Case(model="Llama-3.1-8B", topology="v5p:2x2x1", tensor_parallel=4),
    Case(model="Llama-3.1-8B", topology="tpu7x:1x1x1", tensor_parallel=2),
    Case(model="Llama-3.1-70B", topology="v5e:4x4", tensor_parallel=16),
    Case(model="Llama-3.1-70B", topology="v6e:2x4", tensor_parallel=8),
    Case(model="Llama-3.1-70B", topology="v5e:2x4", tensor_parallel=8, quantization="int8"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What the compiler says about one case; bytes per chip."""

    case: Case
    hbm_bytes: int  # what the chip gives to programs
    weight_bytes: int
    kv_tokens: int  # capacity of the KV cache
    num_layers: int
    num_programs: int  # of the whole deployment
    decode: ProgramReport
    prefill: ProgramReport | None  # the step with most tokens and rows
    decode_bytes: int  # of one decode step, keys and values included
    minimum_bytes: int  # weights and keys and values, each once

    @property
    def over_minimum(self) -> float:
        return self.decode_bytes / self.minimum_bytes - 1

    @property
    def peak_bytes(self) -> int:
        return max(report.peak_bytes for report in (self.decode, self.prefill) if report)

    @property
    def temporary_bytes(self) -> int:
        return max(report.temp_bytes for report in (self.decode, self.prefill) if report)

    @property
    def collective_bytes(self) -> int:
        return sum(collective.bytes * collective.count for collective in self.decode.collectives)


def prove(case: Case, *, prefill: bool = True) -> Proof:
    """Compiles a case's decode step and, if wanted, its largest one, with all the KV blocks that fit.

    Raises:
        BackendError: the compiler refuses it.
    """
    config = EngineConfig(
        model=case.model,
        backend="tpu",
        tensor_parallel_size=case.tensor_parallel,
        quantization=case.quantization,
        max_model_len=MAX_MODEL_LEN,
    )
    deployment = open_deployment(config, open_model_config(case.model), case.topology)
    topology = find_topology(case.topology)
    assert isinstance(topology, TpuSlice)
    plan = deployment.plan(topology.bytes_per_device)
    shapes = deployment.step_shapes
    smallest = min(shape for shape in shapes if shape.decode_only and shape.rows >= ROWS)
    decode = compile_step(deployment, smallest, plan.num_blocks)
    largest = max((shape for shape in shapes if not shape.decode_only), key=_size)
    return Proof(
        case=case,
        hbm_bytes=topology.bytes_per_device,
        weight_bytes=deployment.weight_bytes_per_device,
        kv_tokens=plan.num_blocks * config.block_size,
        num_layers=deployment.model.num_layers,
        num_programs=len(shapes),
        decode=decode,
        prefill=compile_step(deployment, largest, plan.num_blocks) if prefill else None,
        decode_bytes=decode.hbm_bytes + ROWS * CONTEXT * _stored_bytes_per_token(deployment),
        minimum_bytes=_weights_read(deployment) + ROWS * CONTEXT * _bytes_per_token(deployment),
    )


def _size(shape: StepShape) -> tuple[int, int]:
    return shape.tokens, shape.rows


def _weights_read(deployment: Deployment) -> int:
    """A chip's share of the weights without the embedding, of which a step takes rows, unless it is the head too."""
    params = deployment.parameter_shapes()
    embedding = 0 if deployment.model.tie_embeddings else bytes_per_device(params["embed"])
    return deployment.weight_bytes_per_device - embedding


def _stored_bytes_per_token(deployment: Deployment) -> int:
    """Keys and values as the cache lays them out."""
    return deployment.kv_bytes_per_block_per_device // deployment.config.block_size


def _bytes_per_token(deployment: Deployment) -> int:
    """Keys and values of one chip's heads without any padding, bfloat16."""
    model = deployment.model
    heads = -(-model.num_kv_heads // deployment.chips)
    return 2 * model.num_layers * heads * model.head_dim * 2


HEADER = (
    "model",
    "slice",
    "TP",
    "weights GiB",
    "KV tokens",
    "peak / HBM GiB",
    "temporaries MiB (decode, largest)",
    "decode MB",
    "minimum MB",
    "over",
    "ICI MB",
    "programs",
    "compile s (decode, largest)",
)


def row(proof: Proof) -> tuple[str, ...]:
    """A line of the table."""
    case, decode, prefill = proof.case, proof.decode, proof.prefill
    reports = [report for report in (decode, prefill) if report]
    return (
        f"{case.model} {case.quantization or 'bf16'}",
        case.topology,
        str(case.tensor_parallel),
        f"{proof.weight_bytes / GIB:.2f}",
        f"{proof.kv_tokens:,}",
        f"{proof.peak_bytes / GIB:.2f} / {proof.hbm_bytes / GIB:.2f}",
        ", ".join(f"{report.temp_bytes / 2**20:.0f}" for report in reports),
        f"{proof.decode_bytes / 1e6:,.0f}",
        f"{proof.minimum_bytes / 1e6:,.0f}",
        f"{proof.over_minimum:.1%}",
        f"{proof.collective_bytes / 1e6:.0f}",
        str(proof.num_programs),
        ", ".join(f"{report.compile_seconds:.0f}" for report in reports),
    )


def table(proofs: list[Proof]) -> str:
    lines = [HEADER, tuple("---" for _ in HEADER), *(row(proof) for proof in proofs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str]) -> int:
    """Compiles all cases; writes the table into the file that is named, or to stdout."""
    proofs = []
    for case in CASES:
        try:
            proofs.append(prove(case))
        except BackendError as error:
            print(f"{case}: {error}", file=sys.stderr)
            return 1
        print(f"{case}: {proofs[-1].over_minimum:.1%} over the minimum", file=sys.stderr, flush=True)
    if not argv:
        print(table(proofs))
        return 0
    path = Path(argv[0])
    before, _, rest = path.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    path.write_text(f"{before}{MARKERS[0]}\n{table(proofs)}\n{MARKERS[1]}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
