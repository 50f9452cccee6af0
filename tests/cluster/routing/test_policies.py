"""Where requests go: to what they have cached, within bounds of load, and nowhere in particular else."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.news import EngineLoad
from tests.cluster.routing.fleets import BLOCK, Site, hashes, prompt


def load(running: int = 0, waiting: int = 0, queued_tokens: int = 0, free_blocks: int = 1000) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, queued_tokens=queued_tokens, free_blocks=free_blocks)


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin"])
def test_different_prompts_spread_evenly(policy: str) -> None:
    site = Site(policy)
    for number in range(400):
        site.send(prompt(number))
        if number >= 40:
            site.end_first()
    counts = site.counts()
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    site = Site()
    site.fleet.cache_is("c", hashes(prompt(1)))
    assert {site.choose(prompt(1, tail=tail)) for tail in range(1, 20)} == {"c"}
    assert {site.choose(prompt(2, tail=tail)) for tail in range(1, 40)} == set("abcd")


def test_the_longer_of_two_prefixes_counts() -> None:
    site = Site()
    tokens = prompt(1, 8 * BLOCK)
    site.fleet.cache_is("a", hashes(tokens)[:6])
    site.fleet.cache_is("b", hashes(tokens)[:3])
    site.fleet.cache_is("c", hashes(tokens)[1:])  # without its head it is of no use
    assert {site.choose(tokens) for _ in range(20)} == {"a"}


def test_another_tenants_prefix_is_not_the_same() -> None:
    site = Site()
    site.fleet.cache_is("c", hashes(prompt(1), salt="mine"))
    assert {site.choose(prompt(1), salt="mine") for _ in range(20)} == {"c"}
    assert len({site.choose(prompt(1), salt="yours") for _ in range(40)}) == 4


def test_a_cached_prefix_is_worth_waiting_for_less_than_computing_it_takes() -> None:
    site = Site()
    tokens = prompt(1, 64 * BLOCK)
    site.fleet.cache_is("a", hashes(tokens))
    site.fleet.load_is("a", load(running=1, queued_tokens=32 * BLOCK))
    assert site.choose(tokens) == "a"
    site.fleet.load_is("a", load(running=1, queued_tokens=1000 * BLOCK))
    assert site.choose(tokens) != "a"


def test_a_popular_prefix_spreads_under_load() -> None:
    site = Site()
    tokens = prompt(1, 64 * BLOCK)
    for _ in range(4):
        site.send(tokens)
    assert sorted(site.counts().values()) == [0, 0, 0, 4]  # while there are few, they stay together
    for _ in range(60):
        site.send(tokens)
    counts = site.counts()
    assert min(counts.values()) > 0
    assert max(counts.values()) <= 1.5 * len(site.open) / 4 + 1


def test_prompts_that_all_begin_alike_reach_replicas_that_have_nothing_of_them() -> None:
    site = Site()
    for name in "abc":
        site.fleet.cache_is(name, hashes(prompt(1, 8 * BLOCK)))
    homes: Counter[str] = Counter()
    for number in range(200):
        replica = site.send(prompt(1, 8 * BLOCK)[:-1] + prompt(number + 2, 24 * BLOCK))
        homes[replica] += 1
        site.fleet.prefilled(replica, site.open[-1][1])  # nothing is queued: only what decodes tells them apart
        if number >= 12:
            site.end_first()
    assert homes["d"] > 0.5 * 200 / 4


def test_prefixes_share_the_replicas_and_stay_where_they_are() -> None:
    site = Site()
    homes: dict[int, Counter[str]] = {prefix: Counter() for prefix in range(16)}
    for number in range(800):
        prefix = number * 7 % 16
        homes[prefix][site.send(prompt(prefix, 32 * BLOCK, tail=number + 1))] += 1
        if number >= 8:
            site.end_first()
    stayed = sum(max(home.values()) for home in homes.values())
    assert stayed > 0.9 * 800
    total = sum(homes.values(), Counter())
    assert max(total.values()) < 2 * min(total.values())


def test_a_replica_without_free_blocks_is_not_preferred_for_its_cache() -> None:
    site = Site()
    tokens = prompt(1, 8 * BLOCK)
    site.fleet.cache_is("a", hashes(tokens)[:4])
    site.fleet.load_is("a", load(free_blocks=2))
    assert site.choose(tokens) != "a"
    site.fleet.load_is("a", load(free_blocks=20))
    assert site.choose(tokens) == "a"


def test_what_other_routers_have_sent_counts() -> None:
    site = Site("least_loaded")
    for name in "abc":
        site.fleet.load_is(name, load(running=10, waiting=5))
    assert {site.choose(prompt(1)) for _ in range(20)} == {"d"}


def test_a_burst_counts_before_any_report_has_come() -> None:
    site = Site("least_loaded")
    for number in range(40):
        site.send(prompt(number))
    assert set(site.counts().values()) == {10}


def test_requests_that_came_after_a_report_count_besides_it() -> None:
    site = Site("least_loaded", "a", "b")
    site.fleet.load_is("a", load(running=3))
    site.fleet.load_is("b", load(running=3))
    for number in range(10):
        site.send(prompt(number))
    assert site.counts() == {"a": 5, "b": 5}


def test_an_old_report_counts_less_and_less() -> None:
    site = Site("least_loaded", "a", "b")
    site.fleet.load_is("a", load(running=100, queued_tokens=50_000))
    site.send(prompt(1))  # one of our own, at b
    assert site.counts() == {"a": 0, "b": 1}
    assert site.choose(prompt(2)) == "b"
    site.clock.now += 120
    assert site.choose(prompt(2)) == "a"


def test_a_request_that_has_its_first_token_weighs_less() -> None:
    site = Site("least_loaded", "a", "b")
    first = site.send(prompt(1, 100 * BLOCK))
    second = site.send(prompt(2, 50 * BLOCK))
    assert {first, second} == {"a", "b"}
    site.fleet.prefilled(first, site.open[0][1])
    assert site.choose(prompt(3)) == first


def test_of_many_replicas_some_are_compared_and_those_with_the_prefix() -> None:
    names = [f"replica-{number}" for number in range(500)]
    site = Site("prefix", *names)
    site.fleet.cache_is("replica-321", hashes(prompt(1, 32 * BLOCK)))
    assert site.choose(prompt(1, 32 * BLOCK, tail=1)) == "replica-321"
    for number in range(2000):
        site.send(prompt(number + 10, BLOCK))
    assert max(site.counts().values()) <= 8  # 4 are the mean


def test_routers_with_the_same_news_do_not_all_choose_the_same() -> None:
    assert len({Site(seed=seed).choose(prompt(1)) for seed in range(30)}) == 4


def test_sessions_stick_and_move_only_when_they_must() -> None:
    site = Site(sticky=True)
    homes = {session: site.choose(prompt(session), f"user-{session}") for session in range(40)}
    assert set(homes.values()) == set("abcd")
    again = Site(sticky=True, seed=7)  # another router
    assert homes == {session: again.choose(prompt(session + 100), f"user-{session}") for session in range(40)}
    site.names.remove("b")
    for session, home in homes.items():
        now = site.choose(prompt(session), f"user-{session}")
        assert now == home or home == "b"


def test_a_session_leaves_a_replica_that_has_too_much_to_do() -> None:
    site = Site(sticky=True)
    homes = [site.send(prompt(number), "one") for number in range(40)]
    assert len(set(homes[:4])) == 1
    assert len(set(homes)) > 1
    assert max(site.counts().values()) <= 1.5 * 10 + 1


def test_without_a_session_the_policy_decides() -> None:
    site = Site(sticky=True)
    site.fleet.cache_is("c", hashes(prompt(1)))
    assert {site.choose(prompt(1)) for _ in range(10)} == {"c"}
