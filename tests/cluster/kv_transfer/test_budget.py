"""Bytes under way: first come first served, and whoever leaves the line, whenever, costs nobody anything."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.kv_transfer.budget import ByteBudget


async def test_a_place_in_line_that_is_given_up_costs_nobody_anything() -> None:
    budget = ByteBudget(10)
    held = await budget.take(8)
    waiting = [asyncio.create_task(budget.take(size)) for size in (5, 4, 2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not waiting[1].done()
    budget.give_back(held)
    waiting[1].cancel()  # at the moment in which it gets its room
    assert await waiting[2] == 2
    await asyncio.gather(*waiting, return_exceptions=True)
    assert budget.taken == 2


async def test_who_leaves_in_the_moment_in_which_room_comes_takes_none_of_it() -> None:
    budget = ByteBudget(10)
    held = await budget.take(10)
    leaves, stays = (asyncio.create_task(budget.take(size)) for size in (5, 6))
    await asyncio.sleep(0)
    leaves.cancel()  # it has not run since when room comes
    budget.give_back(held)
    assert await asyncio.wait_for(stays, 5) == 6
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert budget.taken == 6


@pytest.mark.parametrize("seed", range(20))
async def test_after_any_order_of_comings_and_goings_nothing_is_taken(seed: int) -> None:
    budget, source = ByteBudget(10), random.Random(seed)
    most = 0

    async def visitor() -> None:
        nonlocal most
        share = await budget.take(source.randrange(1, 14))
        most = max(most, budget.taken)
        try:
            for _ in range(source.randrange(3)):
                await asyncio.sleep(0)
        finally:
            budget.give_back(share)

    visitors: list[asyncio.Task[None]] = []
    for _ in range(200):
        visitors.append(asyncio.create_task(visitor()))
        if source.random() < 0.5:
            source.choice(visitors).cancel()
        if source.random() < 0.5:
            await asyncio.sleep(0)
    ends = await asyncio.wait_for(asyncio.gather(*visitors, return_exceptions=True), 10)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
    assert budget.taken == 0
    assert most <= 10
    assert await asyncio.wait_for(budget.take(10), 5) == 10
