"""Pools of gangs behind Serve, with the prefix store: answers, a host that dies in the middle, and what is left."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray

from tests.backends.jax.test_tensor_parallel import SMALL
from tests.backends.models import tiny_llama
from tests.cluster.apps import completion, deployed, eventually, metric
from tests.cluster.kv_transfer.load import Load, assert_nothing_left, is_well, stored_bytes, total
from tests.cluster.kv_transfer.test_pools import expected, text
from tests.cluster.kv_transfer.test_pools_matrix import REQUESTS, ask

APPLICATION = "hosts"
TOKEN_BYTES = 1024
GANGS: dict[str, object] = {"num_hosts": 2, "tensor_parallel_size": 2, "disagg_topo": "1,1"}
OPTIONS: dict[str, object] = {
    **GANGS,
    "mock_prefill_ms_per_token": 1,
    "mock_kv_bytes_per_token": TOKEN_BYTES,
    "max_decode_seqs": 16,
    "max_num_batched_tokens": 64,
    "disagg_min_prefill_tokens": 100,
    "kv_transfer_object_mib": 0,
    "kv_transfer_checksums": True,
    "kv_transfer_timeout_s": 5,
    "step_deadline_s": 10,
    "kv_store": "object_store",
    "kv_store_gib": 0.1,
}


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    with deployed(serve_url, APPLICATION, **OPTIONS) as address:
        eventually(lambda: list(metric(address, "sliceserve_kv_store_connected").values()) == [1, 1], 30)
        yield address


def workers(url: str, role: str) -> list[psutil.Process]:
    """The processes of a pool's only gang, in the order of ranks."""
    [replica] = metric(url, "vllm:num_requests_running", role=role)
    names = [f"sliceserve:{APPLICATION}:{replica}:worker:{rank}" for rank in range(2)]
    actors = [ray.get_actor(name, namespace="serve") for name in names]
    return [psutil.Process(found.pid) for found in ray.get([actor.describe.remote() for actor in actors], timeout=10)]


def cached_tokens(url: str, tokens: list[int]) -> int:
    answer = completion(url, prompt=tokens, max_tokens=5, temperature=0).json()
    assert answer["choices"][0]["text"] == expected(tokens, 5)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def passing_bytes(url: str) -> int:
    """Bytes in the object store beside those that the prefix store keeps."""
    return stored_bytes() - int(max(metric(url, "sliceserve_kv_store_used_bytes").values()))


@pytest.fixture(scope="module")
def idle_bytes(url: str) -> int:
    return passing_bytes(url)


@pytest.mark.usefixtures("idle_bytes")  # before anything happens
def test_gangs_answer_as_one_engine_does_and_their_kv_goes_from_host_to_host(url: str) -> None:
    long, other = list(range(300, 700)), list(range(1400, 1900))
    assert text(url, prompt=long, max_tokens=20, temperature=0) == expected(long, 20)
    assert text(url, prompt=other, max_tokens=20, temperature=1, seed=7) == expected(other, 20, seed=7)
    assert total(url, "sliceserve_kv_transfers_total", role="decode") == 2
    assert total(url, "sliceserve_kv_transfer_tokens_total", role="decode") == 900
    assert total(url, "sliceserve_kv_transfer_bytes_total", role="decode") == 900 * TOKEN_BYTES
    assert total(url, "sliceserve_kv_transfer_bytes_total", role="prefill") == 900 * TOKEN_BYTES
    assert total(url, "sliceserve_kv_transfer_failures_total") == 0
    assert is_well(url)


def test_when_a_prefill_host_dies_in_the_middle_of_a_prompt_the_client_sees_but_latency(url: str) -> None:
    victim = workers(url, "prefill")[1]
    tokens = list(range(3000, 4500))  # 1.5 s
    bytes_before = total(url, "sliceserve_kv_transfer_bytes_total", role="decode")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(text, url, prompt=tokens, max_tokens=8, temperature=1, seed=3)
        eventually(lambda: total(url, "sliceserve_kv_transfer_bytes_total", role="decode") > bytes_before)
        victim.kill()
        assert answer.result(60) == expected(tokens, 8, seed=3)
    came = total(url, "sliceserve_kv_transfer_bytes_total", role="decode") - bytes_before
    assert 0 < came < len(tokens) * TOKEN_BYTES
    assert_nothing_left(url, 0, lambda: 0)  # of bytes, the last test knows


@pytest.mark.matrix
def test_a_new_decode_gang_finds_in_the_store_what_the_lost_one_had(url: str) -> None:
    eventually(lambda: is_well(url), 60)
    tokens = random.Random(1).choices(range(100, 20000), k=640)
    assert cached_tokens(url, tokens) == 0
    running = list(range(5000, 5040))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(text, url, prompt=running, max_tokens=200, temperature=0)
        time.sleep(0.3)
        workers(url, "decode")[1].kill()
        assert answer.result(90) == expected(running, 200)
    eventually(lambda: list(metric(url, "sliceserve_kv_store_connected").values()) == [1, 1], 60)
    hits = total(url, "sliceserve_kv_store_hit_tokens_total", role="decode")
    assert cached_tokens(url, [*tokens, 7, 8, 9]) == 640
    assert total(url, "sliceserve_kv_store_hit_tokens_total", role="decode") - hits == 640


@pytest.mark.matrix
def test_neither_cancels_nor_lost_hosts_leave_anything_behind(url: str, idle_bytes: int) -> None:
    eventually(lambda: is_well(url), 60)
    load = Load(url, expected, seed=8)
    load.run(120)
    assert load.wrong == []
    assert load.cancelled > 20
    assert_nothing_left(url, idle_bytes, lambda: passing_bytes(url))


TOPOLOGIES: list[dict[str, Any]] = [
    {**GANGS, "block_size": 8, "prefill_block_size": 16},
    {**GANGS, "tensor_parallel_size": 4, "prefill_tensor_parallel_size": 2, "prefill_block_size": 32},
    {**GANGS, "num_hosts": 1, "tensor_parallel_size": 1, "prefill_num_hosts": 2, "prefill_tensor_parallel_size": 2},
    {**GANGS, "prefill_num_hosts": 1, "prefill_tensor_parallel_size": 1, "prefill_block_size": 8},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 49152}  # the demo tokenizer's
    folder = tiny_llama(tmp_path_factory.mktemp("llama") / "model", **sizes)
    small = {**SMALL, "max_model_len": 512, "max_num_batched_tokens": 64}
    return {
        **small,
        "backend": "cpu",
        "dtype": "float32",
        "model": str(folder),
        "tokenizer": "smollm2",
        "step_deadline_s": 60,
    }


@pytest.fixture(scope="module")
def answers(serve_url: str, model: dict[str, Any]) -> list[Any]:
    with deployed(serve_url, "alone", **model) as address:
        return [ask(address, **request) for request in REQUESTS]


@pytest.mark.matrix
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["alike", "unequal", "to one host", "from one host"])
def test_a_models_answers_do_not_depend_on_the_hosts(
    serve_url: str, model: dict[str, Any], answers: list[Any], topology: dict[str, Any]
) -> None:
    pools = {"disagg_min_prefill_tokens": 32, "kv_transfer_object_mib": 0, "kv_transfer_checksums": True}
    pools |= {"kv_transfer_timeout_s": 60, "enable_prefix_cache_hbm": False}
    with deployed(serve_url, "several", **{**model, **pools, **topology}) as address:
        for request, answer in zip(REQUESTS, answers, strict=True):
            assert ask(address, **request) == answer, request
        assert total(address, "sliceserve_kv_transfers_total", role="decode") == len(REQUESTS)
        assert total(address, "sliceserve_kv_transfer_failures_total") == 0
