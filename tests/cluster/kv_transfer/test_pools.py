"""A prefill and a decode pool through HTTP: the same answers as without, whatever happens to the prefill pool."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.apps import completion, deployed, eventually, metric, replica_processes

OPTIONS: dict[str, object] = {"mock_prefill_ms_per_token": 0.1, "max_decode_seqs": 16}
POOLS: dict[str, object] = {
    **OPTIONS,
    "disagg_topo": "1,1",
    "disagg_min_prefill_tokens": 100,
    "prefill_block_size": 8,
    "prefill_max_num_batched_tokens": 512,
    "kv_transfer_checksums": True,
    "kv_transfer_timeout_s": 5,
}
REQUESTS: list[dict[str, object]] = [
    {"prompt": list(range(300, 1300)), "max_tokens": 20, "temperature": 0},
    {"prompt": list(range(400, 1700)), "max_tokens": 20, "temperature": 1, "seed": 7},
    {"prompt": list(range(300, 1300)), "max_tokens": 8, "temperature": 0},  # its prefix is cached by then
    {"prompt": list(range(500, 750)), "max_tokens": 1, "temperature": 1, "seed": 8},
    {"prompt": list(range(600, 650)), "max_tokens": 20, "temperature": 1, "seed": 9},  # too short to travel
    {"prompt": list(range(700, 900)), "max_tokens": 5, "temperature": 1, "seed": 3, "logprobs": 2},
]


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    with deployed(serve_url, "pools", **POOLS) as address:
        yield address


def sums(url: str, name: str, **labels: str) -> float:
    return sum(metric(url, name, **labels).values())


def choices(url: str) -> list[object]:
    answers = [completion(url, **request).json() for request in REQUESTS]
    return [answer["choices"] for answer in answers]


def test_answers_are_those_of_a_unified_engine_and_prefill_has_computed_them(url: str, serve_url: str) -> None:
    answers = choices(url)
    assert sums(url, "sliceserve_kv_transfers_total", role="decode") == 4
    assert sums(url, "sliceserve_kv_transfer_failures_total") == 0
    tokens = sums(url, "sliceserve_kv_transfer_tokens_total", role="decode")
    assert tokens > 2700
    with deployed(serve_url, "unified", **OPTIONS) as unified:
        assert answers == choices(unified)
