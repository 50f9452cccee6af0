"""Four mock engines behind one ingress, through HTTP: requests follow their prefixes, and spread where they can't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.apps import completion, deployed, eventually, metric

REPLICAS = 4
PREFIX = 320  # tokens: ten blocks


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    # Steps are long enough that what the machine does besides makes no replica faster than others, and busier.
    options = {"data_parallel_size": REPLICAS, "mock_step_ms": 10, "mock_prefill_ms_per_token": 0.05}
    options |= {"sticky_sessions": True}  # of no effect on requests without a session
    with deployed(serve_url, "routing", **options) as address:
        eventually(lambda: len(served(address)) == REPLICAS)
        yield address


def served(url: str) -> dict[str, float]:
    """Requests that each replica has answered, also none."""
    return metric(url, "vllm:request_success_total", finished_reason="length")


def answers(url: str, prompts: list[list[int]], session: str | None = None) -> tuple[Counter[str], list[int]]:
    """Sends prompts, a few at a time. Returns the requests that each replica got, and the cached tokens of each."""
    before = served(url)
    with ThreadPoolExecutor(REPLICAS) as pool:
        replies = list(pool.map(lambda p: completion(url, prompt=p, max_tokens=8, prompt_cache_key=session), prompts))
    usages = [reply.json()["usage"] for reply in replies]
    after = served(url)
    counts = Counter({replica: int(count - before[replica]) for replica, count in after.items()})
    return counts, [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]


def prompt(prefix: int, tail: int) -> list[int]:
    return [1000 + prefix] * PREFIX + [2000 + tail] * 8


def test_requests_with_a_prefix_find_it_cached_wherever_it_is(url: str) -> None:
    prefixes = range(8)
    answers(url, [prompt(prefix, 0) for prefix in prefixes])
    _, cached = answers(url, [prompt(prefix, tail) for tail in range(1, 6) for prefix in prefixes])
    assert sum(tokens == PREFIX for tokens in cached) >= 0.9 * len(cached)


def test_requests_that_have_nothing_in_common_spread_over_the_replicas(url: str) -> None:
    counts, cached = answers(url, [[3000 + number] * 100 for number in range(80)])
    assert sum(counts.values()) == 80
    assert sum(cached) == 0
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_requests_of_a_session_meet_at_one_replica_and_sessions_spread(url: str) -> None:
    homes = set()
    for session in range(8):
        counts, _ = answers(url, [[5000 + 100 * session + number] * 100 for number in range(3)], f"session-{session}")
        [home] = [replica for replica, count in counts.items() if count]
        assert counts[home] == 3
        homes.add(home)
    assert len(homes) > 1
