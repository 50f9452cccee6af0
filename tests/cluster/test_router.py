"""Which replica gets a request: the one that was chosen, else one with little to do."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.mailbox import MailboxAddress
from cluster.messages import Ticket
from cluster.router import EngineRouter, Question
from engine.request import EngineRequest, SamplingParams

REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
ADDRESS = MailboxAddress(host="127.0.0.1", port=1, secret="")


class Router(EngineRouter):
    """Without the Serve around it. `known` is what Serve knows of each replica's open requests."""

    def __init__(self, **known: int) -> None:
        self.known = known

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda replica_id: self.known.get(replica_id.unique_id))


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


async def first(router: Router, about: object, *names: str) -> str:
    request = SimpleNamespace(args=[about], routing_context=SimpleNamespace())
    ranks = await router.choose_replicas(replicas(*names), request)  # type: ignore[arg-type]
    name: str = ranks[0][0].replica_id.unique_id
    return name


async def test_a_call_goes_where_its_ticket_says_whatever_the_load() -> None:
    ticket = Ticket(request_id="r", stream=1, address=ADDRESS, replica="b")
    assert {await first(Router(b=100), ticket, "a", "b", "c") for _ in range(20)} == {"b"}


async def test_a_call_to_a_replica_that_is_gone_goes_to_another_one() -> None:
    ticket = Ticket(request_id="r", stream=1, address=ADDRESS, replica="gone")
    assert await first(Router(), ticket, "a") == "a"


@pytest.mark.parametrize(("known", "own"), [({"a": 3}, {}), ({}, {"a": 3}), ({"a": 1, "b": 2}, {"a": 3})])
async def test_a_request_goes_to_the_replica_with_fewer_open_ones(known: dict[str, int], own: dict[str, int]) -> None:
    question = Question(request=REQUEST, open_requests=own)
    assert {await first(Router(**known), question, "a", "b") for _ in range(20)} == {"b"}


async def test_a_burst_is_spread_evenly_before_serve_knows_of_any_of_it() -> None:
    own: Counter[str] = Counter()
    for _ in range(40):
        own[await first(Router(), Question(request=REQUEST, open_requests=own), "a", "b")] += 1
    assert own == {"a": 20, "b": 20}
