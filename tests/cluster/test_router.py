"""Which replica gets a request: the one that was chosen, else the one that the policy says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.balancer import Balancer
from cluster.messages import Ticket
from cluster.router import EngineRouter
from cluster.sockets import LineAddress
from engine.config import EngineConfig
from engine.news import EngineLoad
from engine.request import EngineRequest, SamplingParams
from tests.cluster.routing.fleets import hashes

ADDRESS = LineAddress(host="127.0.0.1", port=1, secret="")
PROMPT = tuple(range(200))


class Router(EngineRouter):
    """Without the Serve around it. `known` is what Serve knows of each replica's open requests."""

    def __init__(self, **known: int) -> None:
        self.known = known

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(
            get=lambda replica_id: self.known.get(replica_id.unique_id),
            update=lambda replica_id, length: self.known.update({replica_id.unique_id: length}),
        )


@pytest.fixture
def balancer() -> Balancer:
    return Balancer.of(EngineConfig(block_size=16))


def request(name: str = "r") -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))


async def first(router: Router, about: object, *names: str) -> str:
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    pending = SimpleNamespace(args=[about], routing_context=SimpleNamespace())
    ranks = await router.choose_replicas(replicas, pending)  # type: ignore[arg-type]
    name: str = ranks[0][0].replica_id.unique_id
    return name


async def test_a_call_goes_where_its_ticket_says_whatever_the_load() -> None:
    ticket = Ticket(request_id="r", stream=1, address=ADDRESS, replica="b")
    assert {await first(Router(b=100), ticket, "a", "b", "c") for _ in range(20)} == {"b"}


async def test_a_call_to_a_replica_that_is_gone_goes_to_another_one() -> None:
    ticket = Ticket(request_id="r", stream=1, address=ADDRESS, replica="gone")
    assert await first(Router(), ticket, "a") == "a"


async def test_a_call_that_is_about_no_request_goes_to_any_replica() -> None:
    assert {await first(Router(), None, "a", "b", "c") for _ in range(100)} == {"a", "b", "c"}


async def test_what_serve_counts_at_a_replica_counts_for_requests(balancer: Balancer) -> None:
    assert {await first(Router(a=3), balancer.begin(request(str(n))), "a", "b") for n in range(2)} == {"b"}


async def test_a_prefix_that_an_engine_reports_is_gone_to(balancer: Balancer) -> None:
    balancer.cache_is("b", hashes(PROMPT))
    assert {await first(Router(), balancer.begin(request(str(n))), "a", "b", "c") for n in range(4)} == {"b"}


async def test_a_burst_is_spread_evenly_before_anybody_else_knows_of_it(balancer: Balancer) -> None:
    balancer = Balancer.of(EngineConfig(routing_policy="least_loaded"))
    chosen = [await first(Router(), balancer.begin(request(str(n))), "a", "b") for n in range(40)]
    assert chosen.count("a") == 20


async def test_a_replica_that_has_just_failed_is_taken_if_there_is_no_other(balancer: Balancer) -> None:
    route = balancer.begin(request(), suspects={"a", "b"})
    assert {await first(Router(), route, "a", "b", "c") for _ in range(10)} == {"c"}
    assert await first(Router(), route, "b") == "b"


async def test_a_request_counts_at_the_last_replica_chosen_until_its_end(balancer: Balancer) -> None:
    for name in "abc":
        balancer.load_is(name, EngineLoad(running=0, waiting=0, queued_tokens=0, free_blocks=100))
    route = balancer.begin(request())
    for names in ("a", "b"):  # Serve's router may ask again
        await first(Router(), route, names)
    assert route.replica == "b"
    balancer.prefilled(route)
    balancer.end(route)
    balancer.end(route)
    assert await first(Router(), route, "c") == "c"  # asked for by nobody any more
    assert route.replica == ""


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin"])
@pytest.mark.parametrize("sticky", [False, True])
async def test_every_policy_chooses_among_the_replicas_that_there_are(policy: Any, sticky: bool) -> None:
    balancer = Balancer.of(EngineConfig(routing_policy=policy, sticky_sessions=sticky))
    for names in ("abc", "bcd", "e"):
        for number in range(10):
            route = balancer.begin(request(f"{names}{number}"), session="s")
            assert await first(Router(), route, *names) in names
        assert balancer.replicas == set(names)


async def test_without_news_a_prompt_follows_the_ones_before_it(balancer: Balancer) -> None:
    balancer = Balancer.of(EngineConfig(), hears_news=False)
    route = balancer.begin(request())
    home = await first(Router(), route, "a", "b", "c")
    balancer.end(route)
    assert {await first(Router(), balancer.begin(request(str(n))), "a", "b", "c") for n in range(4)} == {home}
