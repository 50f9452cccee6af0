"""The ingress' door: open, requests pass; closed, they are told to come back, and those that are inside go on."""

from __future__ import annotations

import asyncio

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.ingress_server import Door, ResponseCounts


async def test_a_closed_door_keeps_new_requests_out_and_lets_open_ones_end() -> None:
    may_end, counts, door = asyncio.Event(), ResponseCounts(), Door()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await may_end.wait()
        await PlainTextResponse("done")(scope, receive, send)

    transport = httpx.ASGITransport(app=counts.around(door.around(app)))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client, asyncio.timeout(10):
        inside = asyncio.create_task(client.post("/v1/completions"))
        while not counts.open_requests:
            await asyncio.sleep(0)
        door.is_open = False
        refused = await client.post("/v1/completions")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "stopping"
        assert int(refused.headers["retry-after"]) > 0
        assert counts.open_requests == 1
        may_end.set()
        assert (await inside).text == "done"
    assert counts.open_requests == 0
    assert {status: count for (_, status), count in counts.responses.items()} == {"503": 1, "200": 1}
