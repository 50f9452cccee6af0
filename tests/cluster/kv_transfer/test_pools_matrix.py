"""What takes minutes (`make test-disagg`): thousands of requests under fire, and a real model's answers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.cluster.apps import completion, deployed, eventually
from tests.cluster.kv_transfer.load import (
    SERVES_OWN,
    Killer,
    Load,
    assert_nothing_left,
    held_bytes,
    is_well,
    stored_bytes,
    total,
)
from tests.cluster.kv_transfer.test_pools import POOLS, expected

pytestmark = pytest.mark.matrix

PROMPT = " ".join(
    f"The {n}th king of the island had {n + 2} ships, and each of them was faster than the last." for n in range(12)
)
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 2},
    {"temperature": 1, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1, "seed": 4, "frequency_penalty": 0.7, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 0, "logit_bias": {"198": 5, "30": -100}, "stop": ["ships"]},
    {"temperature": 1, "seed": 5, "logprobs": 3},
    {"temperature": 0, "n": 1, "max_tokens": 1, "logprobs": 2},
    {"temperature": 1, "seed": 6, "bad_words": [" the", " a"]},
]
MODEL: dict[str, object] = {
    "backend": "cpu",
    "dtype": "float32",
    "max_running_seqs": 4,
    "max_model_len": 512,
    "num_blocks": 128,
}
TOPOLOGIES = [
    {"prefill_tensor_parallel_size": 2, "prefill_block_size": 16, "prefill_max_num_batched_tokens": 64},
    {"tensor_parallel_size": 3, "block_size": 8, "prefill_tensor_parallel_size": 1, "prefill_block_size": 32},
]


@pytest.mark.parametrize("topology", ["1,1", "2,2"])
def test_two_thousand_requests_with_kills_of_both_pools_leave_nothing_behind(serve_url: str, topology: str) -> None:
    with deployed(serve_url, "siege", **{**POOLS, "disagg_topo": topology}) as url:
        before = stored_bytes()
        load = Load(url, expected, seed=9)
        with contextlib.ExitStack() as stack:
            killers = [Killer("siege", "Prefill", load.rng, every_s=(1, 6))]
            if topology == "2,2":
                killers.append(Killer("siege", "Engine", load.rng, every_s=(5, 15), among=2))
            for killer in killers:
                stack.enter_context(killer)
            load.run(2000)
        assert load.wrong == []
        assert all(killer.kills for killer in killers)
        eventually(lambda: is_well(url), 60)
        if topology == "1,1":
            assert_nothing_left(url, before)
        else:  # a call's result can outlive its caller
            assert_nothing_left(url, before, lambda: before)
            assert held_bytes() - before <= SERVES_OWN


def test_pools_of_gangs_answer_as_one_engine_does(serve_url: str) -> None:
    hosts = {"num_hosts": 2, "tensor_parallel_size": 2}
    with deployed(serve_url, "gangs", **{**POOLS, **hosts}) as url:
        load = Load(url, expected, seed=4)
        load.run(40, threads=4)
        assert load.wrong == []
        assert total(url, "sliceserve_kv_transfers_total", role="decode") > 10
        assert total(url, "sliceserve_kv_transfer_failures_total") == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_models_answers_do_not_depend_on_the_topology(serve_url: str, topology: dict[str, Any]) -> None:
    own = {key: value for key, value in topology.items() if not key.startswith("prefill_")}
    with deployed(serve_url, "together", **MODEL) as url:
        answers = [ask(url, **request) for request in REQUESTS]
    pools = {"disagg_topo": "1,1", "disagg_min_prefill_tokens": 32, "kv_transfer_object_mib": 1, **topology}
    pools |= {"kv_transfer_checksums": True, "enable_prefix_cache_hbm": False}
    with deployed(serve_url, "apart", **{**MODEL, **own, **pools}) as url:
        for request, answer in zip(REQUESTS, answers, strict=True):
            assert ask(url, **request) == answer, request
        assert total(url, "sliceserve_kv_transfers_total", role="decode") == len(REQUESTS)
        assert total(url, "sliceserve_kv_transfer_failures_total") == 0


def ask(url: str, **request: Any) -> Any:
    answer = completion(url, **{"prompt": PROMPT, "max_tokens": 24, **request})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    logprobs = choice.pop("logprobs") or {}
    numbers = [round(value, 3) for value in logprobs.get("token_logprobs") or ()]
    return choice, numbers
