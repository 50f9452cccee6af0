"""Published throughput of other TPU servers, and what the planner says about the same slices and requests.

Models that this server doesn't run (Qwen3) are compared by the shapes of their matrices; the rest weighs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from backends.jax.model_config import ModelConfig, RopeScaling
from cluster.plan.costs import AnalyticCosts, StepCost, StepCosts
from cluster.plan.estimate import Group, Performance, unified
from cluster.plan.models import open_model_config
from cluster.plan.roofline import Efficiency, Peaks, prefill_s
from cluster.plan.sizing import Shard
from cluster.plan.workload import Workload
from cluster.topology import TpuSlice, find_topology
from engine.config import GIB

_MEMORY_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured throughput."""

    source: str
    model: str
    topology: str
    workload: Workload
    output_tokens_per_s: float
    quantization: str | None = None
    step_tokens: int = 2048
    static_cache: int | None = None  # tokens of a fixed cache per sequence, all of which every step reads
    kv_item_bytes: int = 2
    named: bool = False  # one of the five that the planner is judged by
    fitted: bool = False  # used to find the efficiencies


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """A measured mean time to first token of prompts that all come at once: it tells the speed of prefill alone."""

    model: str
    topology: str
    prompts: int
    input_tokens: int
    mean_ttft_s: float
    fitted: bool

    @property
    def prompt_s(self) -> float:
        """One prompt's share: on average, half of the prompts and one's own are done."""
        return self.mean_ttft_s * 2 / (self.prompts + 1)

    def expected_prompt_s(self, efficiency: Efficiency) -> float:
        chosen = _tpu(self.topology)
        costs = AnalyticCosts(shard=_shard(self.model, chosen))
        return prefill_s(costs.prefill(self.input_tokens, self.input_tokens / 2), Peaks.of(chosen), efficiency)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    figure: Figure
    bound: Performance
    expected: Performance

    @property
    def of_bound(self) -> float:
        """Measured throughput as a share of the bound."""
        return self.figure.output_tokens_per_s / self.bound.output_tokens_per_s

    @property
    def error(self) -> float:
        """How far the expectation is off, as a share of what was measured."""
        return self.expected.output_tokens_per_s / self.figure.output_tokens_per_s - 1


def compare(efficiency: Efficiency) -> list[Comparison]:
    """Every figure with its bound and its expectation."""
    return [
        Comparison(figure=figure, bound=performance_of(figure, None), expected=performance_of(figure, efficiency))
        for figure in FIGURES
    ]


def performance_of(figure: Figure, efficiency: Efficiency | None) -> Performance:
    """What the planner's formulas say about a figure's deployment: one tensor-parallel group over its slice."""
    chosen = _tpu(figure.topology)
    shard = _shard(figure.model, chosen, figure.quantization)
    costs: StepCosts = AnalyticCosts(shard=shard)
    kv_bytes = chosen.generation.usable_hbm_gib * GIB * _MEMORY_SHARE - shard.weight_bytes
    if figure.static_cache is not None:
        costs = _StaticCache(costs=costs, context=figure.static_cache * figure.kv_item_bytes / 2)
    group = Group(
        costs=costs,
        peaks=Peaks.of(chosen),
        step_tokens=figure.step_tokens,
        kv_tokens=int(kv_bytes * 2 / figure.kv_item_bytes / shard.kv_bytes_per_token),
        max_rows=figure.workload.concurrency,
    )
    return unified(group, figure.workload, 1, efficiency)


def _tpu(topology: str) -> TpuSlice:
    chosen = find_topology(topology)
    assert isinstance(chosen, TpuSlice)
    return chosen


def _shard(model: str, chosen: TpuSlice, quantization: str | None = None) -> Shard:
    return Shard(config=_architecture(model), tensor_parallel=chosen.num_devices, quantization=quantization)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StaticCache:
    """An engine whose decode steps read the whole cache of every sequence, used or not."""

    costs: StepCosts
    context: float

    def decode(self, rows: float, context: float) -> StepCost:  # noqa: ARG002
        return self.costs.decode(rows, self.context)

    def prefill(self, tokens: float, context: float) -> StepCost:
        return self.costs.prefill(tokens, context)


def _model(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(),
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        sliding_window=None,
        eos_token_ids=(),
        bos_token_id=None,
    )


_QWEN = {
    "Qwen3-8B": _model(151936, 4096, 12288, 36, 32, 8),
    "Qwen3-32B": _model(151936, 5120, 25600, 64, 64, 8),
}
_HUB_NAMES = {"Llama-3-8B": "Meta-Llama-3-8B"}  # where it is not the figure's


@cache
def _architecture(model: str) -> ModelConfig:
    return _QWEN[model] if model in _QWEN else open_model_config(_HUB_NAMES.get(model, model))


def _vllm_70b() -> Iterator[Figure]:
    """AI-Hypercomputer/tpu-recipes, Llama3.3 on Trillium (pull request 114): vLLM with a step of 2048 tokens."""
    for concurrency, measured in ((64, 2495), (128, 3545)):
        yield Figure(
            source="vLLM",
            model="Llama-3.3-70B",
            topology="v6e:2x4",
            workload=Workload(input_tokens=1000, output_tokens=1000, concurrency=concurrency),
            output_tokens_per_s=measured,
            named=True,
        )


def _sglang() -> Iterator[Figure]:
    """sglang-jax's benchmark of 12 September 2025 (docs of its repository), and vLLM in the same one."""
    rows = (
        ("SGLang-JAX", "Qwen3-8B", 1024, ((8, 1311), (16, 2243), (32, 3682), (64, 5297), (128, 6732), (256, 7572))),
        ("SGLang-JAX", "Qwen3-8B", 4096, ((8, 1119), (32, 2052), (64, 2529))),
        ("SGLang-JAX", "Qwen3-32B", 1024, ((8, 428), (32, 1356), (64, 1977))),
        ("vLLM 2025-09", "Qwen3-8B", 1024, ((8, 815), (64, 3044), (128, 3900))),
    )
    for source, model, tokens, results in rows:
        for concurrency, measured in results:
            yield Figure(
                source=source,
                model=model,
                topology="v6e:2x2",
                workload=Workload(input_tokens=tokens, output_tokens=1024, concurrency=concurrency),
                output_tokens_per_s=measured,
                named=source == "SGLang-JAX" and (model, tokens, concurrency) == ("Qwen3-8B", 1024, 64),
                fitted=source == "SGLang-JAX" and (model, tokens) == ("Qwen3-8B", 1024),
            )


def _jetstream() -> Iterator[Figure]:
    """jetstream-pytorch, benchmarks/summary.md: ShareGPT requests, a static cache of 2048 tokens, int8 keys with int8.

    Mean lengths are those of JetStream's own log of this benchmark (JetStream, pull request 83): 121 in, 233 out.
    """
    rows = (
        ("Llama-3-8B", None, 128, 8249),
        ("Llama-3-8B", "int8", 256, 10873),
        ("Llama-2-7B", None, 96, 3663),
        ("Llama-2-7B", "int8", 96, 4783),
        ("Llama-2-13B", None, 48, 2056),
        ("Llama-2-13B", "int8", 96, 3458),
    )
    for model, quantization, batch, measured in rows:
        yield Figure(
            source="JetStream",
            model=model,
            topology="v5e:2x4",
            workload=Workload(input_tokens=121, output_tokens=233, concurrency=batch),
            output_tokens_per_s=measured,
            quantization=quantization,
            step_tokens=1024,
            static_cache=2048,
            kv_item_bytes=1 if quantization else 2,
            named=model == "Llama-3-8B",
            fitted=model != "Llama-3-8B" and quantization is None,
        )


FIGURES: tuple[Figure, ...] = (*_vllm_70b(), *_sglang(), *_jetstream())
BURSTS: tuple[Burst, ...] = tuple(
    Burst(model=model, topology="v6e:2x2", prompts=64, input_tokens=tokens, mean_ttft_s=seconds, fitted=fitted)
    for model, tokens, seconds, fitted in (
        ("Qwen3-8B", 1024, 0.941, True),
        ("Qwen3-8B", 4096, 4.108, False),
        ("Qwen3-32B", 1024, 2.864, False),
    )
)
"""SGLang-JAX, the same benchmark with one output token."""
