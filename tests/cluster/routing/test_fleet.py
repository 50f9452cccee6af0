"""What a router knows of its replicas' caches, and when it forgets it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing.chain import PrefixChain
from cluster.routing.prefix_index import PrefixIndex
from engine.kv_cache import block_hashes, root_hash
from engine.request import EngineRequest, SamplingParams
from engine.running import RequestState
from tests.cluster.routing.fleets import BLOCK, Site, hashes, prompt


def test_a_chain_has_the_engines_own_hashes() -> None:
    tokens = prompt(1, 5 * BLOCK)
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=tokens[:50],
        output_token_ids=tokens[50:],
        sampling=SamplingParams(max_tokens=9),
        cache_salt="s",
    )
    chain = PrefixChain(request, BLOCK)
    engine = RequestState(request, eos_token_ids=(), max_model_len=1000).block_hashes(5, BLOCK)
    assert chain.num_blocks == 5
    assert [chain[index] for index in range(5)] == [known_as[:8] for known_as in engine]


def test_a_prompt_of_whole_blocks_leaves_one_for_the_engine_to_compute() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=(1,) * 32, sampling=SamplingParams(max_tokens=9))
    assert PrefixChain(request, BLOCK).num_blocks == 1


def test_only_as_many_blocks_are_hashed_as_some_replica_has() -> None:
    site = Site()
    tokens = prompt(1, 100 * BLOCK)
    site.fleet.cache_is("a", hashes(tokens)[:3])
    question = site.ask(tokens)
    assert question.chain is not None
    assert len(question.chain._hashes) == 4


def test_a_prefix_that_was_sent_counts_as_cached_until_it_is_overdue() -> None:
    site = Site(assumed_s=30)
    home = site.send(prompt(1))
    site.end_first()
    assert {site.choose(prompt(1, tail=tail)) for tail in range(1, 20)} == {home}
    site.clock.now += 31
    while site.send(prompt(2)) != home:  # what is overdue is looked for when something is sent
        pass
    assert site.ask(prompt(1)).match.holders == []


def test_what_an_engine_confirms_stays_known() -> None:
    site = Site(assumed_s=30)
    home = site.send(prompt(1))
    site.fleet.cache_changed(home, hashes(prompt(1)), [])
    site.clock.now += 1000
    for number in range(8):
        site.send(prompt(number + 2))
    assert {site.choose(prompt(1, 4 * BLOCK)) for _ in range(10)} == {home}


def test_evicted_blocks_are_forgotten() -> None:
    site = Site()
    known = hashes(prompt(1))
    site.fleet.cache_is("a", known)
    site.fleet.cache_changed("a", [], known[2:])
    question = site.ask(prompt(1))
    a, b = site.fleet.views("ab")
    assert question.uncached_tokens(a) == 2 * BLOCK + 1
    assert question.uncached_tokens(b) == 4 * BLOCK + 1


def test_assumptions_are_bounded_and_the_first_goes_first() -> None:
    site = Site("prefix", "a", max_assumed_blocks=8)
    for number in range(3):
        site.send(prompt(number))
    (view,) = site.fleet.views("a")
    assert [site.ask(prompt(number)).match.num_blocks(view.bit) for number in range(3)] == [0, 4, 4]


def test_a_replica_whose_line_is_lost_has_nothing() -> None:
    site = Site()
    site.fleet.cache_is("a", hashes(prompt(1)))
    site.fleet.lost("a")
    assert site.ask(prompt(1)).match.holders == []
    site.fleet.lost("never seen")


def test_replicas_come_and_go() -> None:
    site = Site()
    site.fleet.cache_is("a", hashes(prompt(1)))
    home = site.send(prompt(2))
    site.fleet.keep([])
    assert site.ask(prompt(1)).match.holders == []
    site.end_first()  # its request may outlive the replica's place in Serve's list
    site.fleet.keep([])
    site.fleet.ended(home, "long gone")
    site.names = ["e", "f"]
    assert {site.choose(prompt(1)) for _ in range(20)} == {"e", "f"}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_index_agrees_with_plain_sets(seed: int) -> None:
    """Through joins, leaves, reports, evictions and assumptions, of which some are overdue."""
    rng = random.Random(seed)
    index, now = PrefixIndex(max_assumed_blocks=1000), 0.0
    tokens = tuple(rng.randrange(9) for _ in range(6 * BLOCK + 1))
    chain = PrefixChain(
        EngineRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1)), BLOCK
    )
    known: dict[int, set[bytes]] = {}
    blocks = [chain[i] for i in range(6)]
    for _ in range(120):
        now += 1
        if not known or rng.random() < 0.2:
            known[index.join()] = set()
        bit = rng.choice(list(known))
        some = rng.sample(blocks, rng.randrange(6))
        match rng.randrange(4):
            case 0:
                index.add(bit, some)
                known[bit] |= set(some)
            case 1:
                index.discard(bit, some)
                known[bit] -= set(some)
            case 2:
                index.assume(bit, some, now=now, until=now + 1000)
                known[bit] |= set(some)
            case _:
                index.leave(bit)
                del known[bit]
        match = index.match(chain)
        for bit, has in known.items():
            assert match.num_blocks(bit) == next((i for i, block in enumerate(blocks) if block not in has), 6)


def test_the_same_prompt_with_another_adapter_is_another_prefix() -> None:
    tokens = prompt(1, 4 * BLOCK)
    plain, adapted, other = (
        list(block_hashes(root_hash(adapter_digest=digest), tokens, BLOCK)) for digest in (b"", b"a", b"b")
    )
    assert len({*plain, *adapted, *other}) == 3 * len(plain)
    site = Site()
    site.fleet.cache_is("a", [known_as[:8] for known_as in adapted])
    assert site.ask(tokens).match.holders == []


def test_hashes_do_not_depend_on_how_many_are_computed_at_a_time() -> None:
    tokens = prompt(70_000, 6 * BLOCK)
    request = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=9))
    state = RequestState(request, eos_token_ids=(), max_model_len=1000)
    for count in (1, 2, 2, 5):
        assert state.block_hashes(count, BLOCK) == list(block_hashes(root_hash(), tokens, BLOCK))[:count]
