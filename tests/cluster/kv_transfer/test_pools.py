"""A prefill and a decode pool through HTTP: the same answers as without, whatever happens to the prefill pool."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest

from backends.mock import mock_tokens
from cluster.ingress_server import load_tokenizer
from engine.config import EngineConfig
from tests.cluster.apps import completion, deployed, eventually, replica_processes
from tests.cluster.kv_transfer.load import Killer, Load, assert_nothing_left, is_well, prompt, stored_bytes, total

POOLS: dict[str, object] = {
    "mock_prefill_ms_per_token": 0.05,
    "mock_kv_bytes_per_token": 4096,
    "max_decode_seqs": 16,
    "disagg_topo": "1,1",
    "disagg_min_prefill_tokens": 100,
    "prefill_block_size": 8,
    "prefill_max_num_batched_tokens": 256,
    "kv_transfer_object_mib": 1,
    "kv_transfer_checksums": True,
    "kv_transfer_timeout_s": 5,
}


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    with deployed(serve_url, "pools", **POOLS) as address:
        yield address


TOKENIZER = load_tokenizer(EngineConfig.from_args({"backend": "mock"}))


def expected(tokens: list[int], count: int, seed: int = 0) -> str:
    """What any mock engine answers."""
    return TOKENIZER.decode(mock_tokens(tokens, count, seed=seed))


def text(url: str, **fields: object) -> str:
    answer = completion(url, **fields)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def test_answers_are_those_of_a_unified_engine_and_prefill_has_computed_them(url: str) -> None:
    long, other, short = list(range(300, 1300)), list(range(400, 1700)), list(range(600, 650))
    assert text(url, prompt=long, max_tokens=20, temperature=0) == expected(long, 20)
    assert text(url, prompt=other, max_tokens=20, temperature=1, seed=7) == expected(other, 20, seed=7)
    assert text(url, prompt=other[:400], max_tokens=1, temperature=1, seed=7) == expected(other[:400], 1, seed=7)
    assert text(url, prompt=short, max_tokens=20, temperature=0) == expected(short, 20)
    assert total(url, "sliceserve_kv_transfers_total", role="decode") == 2  # the others are cached, or short
    assert total(url, "sliceserve_kv_transfer_tokens_total", role="decode") == 2300
    assert total(url, "sliceserve_kv_transfer_bytes_total", role="decode") == 2300 * 4096
    assert total(url, "sliceserve_kv_transfer_failures_total") == 0
    assert is_well(url)


def test_without_a_prefill_replica_decode_serves_alone_and_says_so(url: str) -> None:
    rng = random.Random(1)

    replica_processes("pools", "Prefill")[0].kill()
    eventually(lambda: httpx.get(f"{url}/health", timeout=20).json()["status"] == "degraded", 5)
    for _ in range(5):
        tokens = prompt(rng, shortest=200)
        assert text(url, prompt=tokens, max_tokens=5, temperature=0) == expected(tokens, 5)
    eventually(lambda: is_well(url), 60)


def is_prefilled(url: str, rng: random.Random) -> bool:
    """Whether a new prompt's KV comes from the prefill pool: for some seconds after a failure decode does not ask."""
    before = total(url, "sliceserve_kv_transfer_tokens_total")
    text(url, prompt=prompt(rng, shortest=200), max_tokens=1)
    return total(url, "sliceserve_kv_transfer_tokens_total") > before


def test_random_cancels_and_the_end_of_a_prefill_replica_change_no_answer_and_leave_nothing_behind(url: str) -> None:
    before, load = stored_bytes(), Load(url, expected, seed=3)
    eventually(lambda: is_prefilled(url, load.rng), 30)
    transfers = total(url, "sliceserve_kv_transfers_total", role="decode")
    load.run(120)
    assert total(url, "sliceserve_kv_transfers_total", role="decode") - transfers > 40
    with Killer("pools", "Prefill", load.rng, every_s=(0.2, 1), most=1) as killer:
        load.run(80)
    assert load.wrong == []
    assert killer.kills == 1
    assert_nothing_left(url, before)
