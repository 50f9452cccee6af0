"""What must hold whatever is planned: more of a resource never hurts, expectations never beat bounds."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.plan.calibration import EXPECTED
from cluster.plan.costs import AnalyticCosts
from cluster.plan.estimate import Group, Performance, disaggregated, unified
from cluster.plan.planner import Plan
from cluster.plan.request import choose_parallelism
from cluster.plan.roofline import Peaks
from cluster.plan.workload import Workload
from cluster.topology import TpuSlice, tpu_slices
from tests.cluster.plan.requests import plan, request

MODELS = st.sampled_from(["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"])
SLICES = st.sampled_from([s for s in tpu_slices() if s.num_chips <= 64])
WORKLOADS = st.builds(
    Workload,
    input_tokens=st.integers(1, 3000),
    output_tokens=st.integers(1, 1000),
    concurrency=st.integers(1, 600),
)
QUANTIZATIONS = st.sampled_from([None, "int8"])


def planned(model: str, chosen: TpuSlice, quantization: str | None, workload: Workload) -> Plan:
    return plan(model, chosen.name, quantization=quantization, workload=workload)


@settings(max_examples=150, deadline=None)
@given(model=MODELS, chosen=SLICES, quantization=QUANTIZATIONS, workload=WORKLOADS)
def test_expectations_stay_within_bounds(
    model: str, chosen: TpuSlice, quantization: str | None, workload: Workload
) -> None:
    performance = planned(model, chosen, quantization, workload).performance
    if performance is None:
        return
    bound, expected = performance.bound, performance.expected
    assert expected.output_tokens_per_s < bound.output_tokens_per_s
    assert expected.ttft_s > bound.ttft_s
    assert expected.tpot_s > bound.tpot_s
    steps = max(1, workload.output_tokens - 1)
    least = workload.output_tokens / (steps * bound.tpot_s)
    assert bound.output_tokens_per_s <= workload.concurrency * least * 1.001


@settings(max_examples=100, deadline=None)
@given(model=MODELS, chosen=SLICES, workload=WORKLOADS)
def test_quantized_weights_leave_more_memory_and_are_read_faster(
    model: str, chosen: TpuSlice, workload: Workload
) -> None:
    dense = planned(model, chosen, None, workload)
    quantized = planned(model, chosen, "int8", workload)
    assert quantized.memory.weight_bytes < dense.memory.weight_bytes
    assert quantized.memory.num_blocks >= dense.memory.num_blocks
    if dense.performance is not None:
        assert quantized.performance is not None
        faster = quantized.performance.bound.output_tokens_per_s
        assert faster >= dense.performance.bound.output_tokens_per_s * 0.999


@settings(max_examples=100, deadline=None)
@given(
    chosen=SLICES,
    factors=st.tuples(st.floats(0.3, 1), st.floats(0.3, 1)),
    lengths=st.tuples(*[st.integers(2048, 16384)] * 2),
)
def test_more_budget_holds_more_and_longer_contexts_fewer(
    chosen: TpuSlice, factors: tuple[float, float], lengths: tuple[int, int]
) -> None:
    low, high = sorted(factors)
    less = plan("meta-llama/Llama-3.1-8B", chosen.name, utilization=low, max_rows=4096).memory
    more = plan("meta-llama/Llama-3.1-8B", chosen.name, utilization=high, max_rows=4096).memory
    assert less.num_blocks <= more.num_blocks
    assert less.safe_factor == more.safe_factor
    short, long = (plan("meta-llama/Llama-3.1-8B", chosen.name, max_model_len=n).memory for n in sorted(lengths))
    assert short.kv_sequences >= long.kv_sequences or not long.fits


@settings(max_examples=60, deadline=None)
@given(model=MODELS, generation=st.sampled_from(["v5e", "v6e", "v5p"]))
def test_what_fits_on_a_slice_fits_on_larger_ones(model: str, generation: str) -> None:
    fitting = [plan(model, s.name).memory.fits for s in tpu_slices(generation) if s.num_chips <= 64]
    assert fitting == sorted(fitting)


@settings(max_examples=100, deadline=None)
@given(chosen=SLICES, workload=WORKLOADS, more=st.integers(1, 300))
def test_more_requests_at_a_time_give_no_less_throughput(chosen: TpuSlice, workload: Workload, more: int) -> None:
    few = planned("meta-llama/Llama-3.1-8B", chosen, None, workload).performance
    many = planned(
        "meta-llama/Llama-3.1-8B", chosen, None, replace(workload, concurrency=workload.concurrency + more)
    ).performance
    if few is None or many is None:
        return
    for before, after in ((few.bound, many.bound), (few.expected, many.expected)):
        # A group takes whole requests: where they don't divide by the groups, one more may round up.
        assert after.output_tokens_per_s >= before.output_tokens_per_s * 0.97


@settings(max_examples=100, deadline=None)
@given(workload=WORKLOADS, prefill=st.integers(1, 4), decode=st.integers(1, 4))
def test_more_pools_never_slow_a_disaggregated_deployment(workload: Workload, prefill: int, decode: int) -> None:
    asked = request("meta-llama/Llama-3.1-8B", "v6e:2x2")
    assert isinstance(asked.topology, TpuSlice)
    group = Group(
        costs=AnalyticCosts(shard=asked.shard),
        peaks=Peaks.of(asked.topology),
        step_tokens=2048,
        kv_tokens=500_000,
        max_rows=256,
    )

    def rate(p: int, d: int) -> Performance:
        return disaggregated(group, workload, p, d, EXPECTED)

    assert rate(prefill + 1, decode).output_tokens_per_s >= rate(prefill, decode).output_tokens_per_s
    assert rate(prefill, decode).tpot_s <= unified(group, workload, decode, EXPECTED).tpot_s * 1.001


@settings(max_examples=60, deadline=None)
@given(model=MODELS, chosen=SLICES)
def test_the_default_parallelism_uses_every_device(model: str, chosen: TpuSlice) -> None:
    asked = request(model, chosen.name)
    assert asked.tensor_parallel * asked.data_parallel == chosen.num_devices
    assert choose_parallelism(asked.model, chosen, asked.tensor_parallel, None)[1] == asked.data_parallel
