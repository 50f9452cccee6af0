"""What someone who reads a plan should know beside its numbers; one line each."""

from __future__ import annotations

from cluster.plan.planner import Plan
from cluster.topology import NeuronInstance

_MUCH_PADDING = 0.01


def notes_on(plan: Plan) -> list[str]:
    request, memory, shard = plan.request, plan.memory, plan.request.shard
    notes = []
    if isinstance(request.topology, NeuronInstance):
        notes.append("Neuron instances are planned for memory only, by formula")
    if shard.padding > _MUCH_PADDING:
        notes.append(
            f"{shard.padding:.0%} of the heads that devices hold are copies or padding: {request.model.num_heads} "
            f"query and {request.model.num_kv_heads} KV heads over {request.tensor_parallel} devices"
        )
    if request.utilization > memory.safe_factor:
        notes.append(
            f"hbm_utilization_factor={request.utilization} leaves too little for temporaries; "
            f"{memory.safe_factor} is the largest that is safe"
        )
    performance = plan.performance
    if performance is not None:
        groups = request.data_parallel * (request.decode_slices or 1)
        running = performance.bound.running * groups
        if running < request.workload.concurrency:
            notes.append(
                f"{running} of {request.workload.concurrency} requests run at a time, the others wait: "
                "the KV cache or max_running_seqs has no room for more; TTFT contains the waiting"
            )
    if plan.programs.source == "formula" and not isinstance(request.topology, NeuronInstance):
        notes.append("by formula: nothing was compiled")
    if plan.programs.unknown_loops:
        notes.append(
            f"{plan.programs.unknown_loops} loops of the programs run as often as requests want; each is counted once"
        )
    if request.prefill_slices:
        notes.append("moving keys and values from prefill to decode is taken as hidden behind computing")
    return notes
