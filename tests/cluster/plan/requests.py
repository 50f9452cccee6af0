"""Requests to plan, made in one line."""

from __future__ import annotations

from typing import Any

from cluster.plan.models import open_model_config
from cluster.plan.planner import Plan, make_plan
from cluster.plan.prices import load_prices
from cluster.plan.request import PlanRequest, choose_parallelism
from cluster.plan.workload import Workload
from cluster.topology import find_topology

PRICES = load_prices(None)


def request(model: str, topology: str, tensor_parallel: int | None = None, **changes: Any) -> PlanRequest:
    config = open_model_config(model)
    chosen = find_topology(topology)
    sizes = choose_parallelism(config, chosen, tensor_parallel, None)
    values: dict[str, Any] = {
        "model_name": model,
        "model": config,
        "topology": chosen,
        "tensor_parallel": sizes[0],
        "data_parallel": sizes[1],
        "quantization": None,
        "max_model_len": 4096,
        "utilization": 0.9,
        "max_rows": 256,
        "step_tokens": 2048,
        "block_size": 32,
        "workload": Workload(input_tokens=1000, output_tokens=1000, concurrency=64),
    }
    return PlanRequest(**{**values, **changes})


def plan(model: str, topology: str, tensor_parallel: int | None = None, **changes: Any) -> Plan:
    return make_plan(request(model, topology, tensor_parallel, **changes), PRICES)
