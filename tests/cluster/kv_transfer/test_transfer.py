"""The prefill side: chunks as they are computed, bounded, until they are acknowledged or given up."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from cluster.gang.kv import GivenKV
from cluster.kv_transfer.messages import MAIN, KVChunk, KVPiece, NoChunk
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import ObjectStoreTransport
from cluster.kv_transfer.table import TransferTable
from cluster.kv_transfer.transfer import Transfer
from cluster.roles import Role
from engine.backend import BackendError
from engine.kv_blocks import KVBlocks, KVLostError, PendingBlocks
from tests.cluster.kv_backend import Ready
from tests.cluster.kv_transfer.kv import FORMAT, blocks, export, last_output

TOKEN = FORMAT.bytes_per_token
READERS = ThreadPoolExecutor(2)


def transport(min_tokens: int = 0, max_tokens: int = 1 << 20) -> ObjectStoreTransport:
    return ObjectStoreTransport(checksums=True, min_bytes=min_tokens * TOKEN, max_bytes=max_tokens * TOKEN)


def transfer(min_tokens: int = 0, max_tokens: int = 1 << 20, held_tokens: int = 1 << 20) -> Transfer:
    return Transfer(transport(min_tokens, max_tokens), READERS, max_bytes=held_tokens * TOKEN)


def table(lease_s: float = 5.0, max_tokens: int = 1 << 20) -> TransferTable:
    return TransferTable(transport(), TransferMetrics(Role.PREFILL), max_bytes=max_tokens * TOKEN, lease_s=lease_s)


async def spans(subject: Transfer) -> list[list[tuple[int, int]]]:
    """Tokens of the pieces of all chunks."""
    found = []
    while isinstance(chunk := await subject.chunk(len(found), len(found)), KVChunk):
        found.append([(piece.start, piece.end) for piece in chunk.pieces])
    assert chunk == NoChunk()
    return found


async def test_what_has_gathered_goes_together_and_large_exports_are_cut() -> None:
    subject = transfer(min_tokens=10, max_tokens=16)
    for start, end in ((0, 10), (10, 14), (14, 18), (18, 22), (22, 54), (54, 57)):
        subject.add(export(start, end))
    subject.take(last_output())
    while not subject._is_read:
        await asyncio.sleep(0.001)
    assert await spans(subject) == [
        [(0, 10), (10, 14)],
        [(14, 18), (18, 22)],
        [(22, 38)],
        [(38, 54)],
        [(54, 57)],
    ]


async def test_little_does_not_go_before_there_is_more_and_a_call_that_waits_gets_no_more_than_enough() -> None:
    subject = transfer(min_tokens=10, max_tokens=100)
    calls = [asyncio.create_task(subject.chunk(index, 0)) for index in (1, 0)]
    for start in range(0, 24, 4):
        subject.add(export(start, start + 4))
        await asyncio.sleep(0.01)
    subject.take(last_output())
    second, first = [await asyncio.wait_for(call, 5) for call in calls]
    assert isinstance(first, KVChunk)
    assert isinstance(second, KVChunk)
    assert [(piece.start, piece.end) for piece in first.pieces] == [(0, 4), (4, 8), (8, 12)]
    assert [(piece.start, piece.end) for piece in second.pieces] == [(12, 16), (16, 20), (20, 24)]


async def test_cut_pieces_are_contiguous_and_hold_their_own_tokens() -> None:
    for piece in transport(max_tokens=7).pack(100, Ready(blocks(100, 120, cut=2))):
        assert [share.heads for share in piece.sections[MAIN]] == [range(2), range(2, 4)]
        for share in piece.sections[MAIN]:
            assert share.data.flags.c_contiguous
            assert share.data.dtype == np.uint16
            assert (share.data[1, 1, 0, :, 3] == range(piece.start, piece.end)).all()


async def test_a_chunk_is_given_as_soon_as_it_is_computed_and_kept_until_it_is_acknowledged() -> None:
    subject = transfer()
    waiting = asyncio.create_task(subject.chunk(0, 0))
    await asyncio.sleep(0)
    subject.add(export(0, 10))
    first = await asyncio.wait_for(waiting, 5)
    assert isinstance(first, KVChunk)
    again = await subject.chunk(0, 0)
    assert isinstance(again, KVChunk)
    assert again.pieces == first.pieces
    assert subject.num_bytes == 10 * TOKEN
    subject.add(export(10, 12))
    assert isinstance(await subject.chunk(1, 1), KVChunk)
    assert subject.num_bytes == 2 * TOKEN
    assert await subject.chunk(0, 1) == NoChunk()


async def test_a_described_chunk_has_no_data_and_is_given_by_heads_until_it_is_acknowledged() -> None:
    subject = table()
    await subject.open("t", 0)
    for start in (0, 10):
        subject.exported(export(start, start + 10))
    chunk = await subject.chunk("t", 0, 0, described=True)
    assert isinstance(chunk, KVChunk)
    assert not any(piece.sections for piece in chunk.pieces)
    assert chunk.num_bytes == subject.metrics.bytes == sum(piece.end - piece.start for piece in chunk.pieces) * TOKEN
    given = await subject.give("t", 0, range(1, 3))
    assert isinstance(given, GivenKV)
    assert [share.heads for share in given.shares] == [range(1, 2), range(2, 3)]
    for share in given.shares:
        assert share.data.flags.c_contiguous
        assert (share.data[1, 1, 0, :, 3] == range(chunk.pieces[-1].end)).all()
    assert given.checksum is not None
    assert isinstance(await subject.give("t", 5, range(4)), NoChunk)
    early = asyncio.create_task(subject.chunk("t", 1, 1, described=True))
    await asyncio.sleep(0)
    assert isinstance(await subject.give("t", 0, range(4)), NoChunk)
    assert isinstance(await subject.give("unknown", 0, range(4)), NoChunk)
    subject.close("t")
    await asyncio.wait([early], timeout=5)


async def test_no_more_is_read_than_may_be_held_before_it_is_fetched() -> None:
    subject = transfer(min_tokens=50, held_tokens=15)
    for start in range(0, 60, 10):
        subject.add(export(start, start + 10))
    await asyncio.sleep(0.1)
    assert subject.num_bytes == 20 * TOKEN
    chunk = await asyncio.wait_for(subject.chunk(0, 0), 5)  # though it is less than what is worth a chunk
    assert isinstance(chunk, KVChunk)
    assert [(piece.start, piece.end) for piece in chunk.pieces] == [(0, 10), (10, 20)]
    subject.take(last_output())
    later = [[(20, 30), (30, 40)], [(40, 50), (50, 60)]]
    assert await asyncio.wait_for(spans(subject), 5) == [[(0, 10), (10, 20)], *later]
    assert subject.num_bytes == 0


@pytest.mark.parametrize("acknowledges", [True, False])
async def test_an_export_that_is_larger_than_all_that_may_be_held_goes_through(acknowledges: bool) -> None:
    subject = transfer(max_tokens=4, held_tokens=15)
    calls = [asyncio.create_task(subject.chunk(index, 0)) for index in range(5)]
    await asyncio.sleep(0)
    subject.add(export(0, 20))
    chunks = await asyncio.wait_for(asyncio.gather(*calls), 5)
    assert all(isinstance(chunk, KVChunk) for chunk in chunks)
    subject.add(export(20, 40))
    subject.add(export(40, 60))
    subject.take(last_output())
    for index in range(5, 15):
        chunk = await asyncio.wait_for(subject.chunk(index, index if acknowledges else 0), 5)
        assert isinstance(chunk, KVChunk)
    assert await subject.chunk(15, 15) == NoChunk()


async def test_a_transfer_that_ends_while_its_reading_waits_leaves_nothing() -> None:
    subject = table(max_tokens=5)
    opened = await subject.open("t", 5 * TOKEN)
    for start in range(0, 40, 10):
        subject.exported(export(start, start + 10))
    await asyncio.sleep(0.1)
    subject.close("t")
    await asyncio.sleep(0.05)
    assert opened._reading is None
    assert opened.num_bytes == subject.metrics.bytes_in_flight == 0


async def test_kv_that_can_not_be_read_fails_the_transfer() -> None:
    class Broken(PendingBlocks):
        def result(self) -> list[KVBlocks]:
            raise BackendError("the device is gone")

    subject = transfer()
    subject.add(replace(export(0, 10), blocks=Broken()))
    answer = await subject.chunk(0, 0)
    assert answer == NoChunk(failure="KV could not be read: the device is gone")
    assert await subject.computed() is None


def _fetched(piece: KVPiece) -> list[KVBlocks]:
    arrivals = transport().unpack(KVChunk(pieces=(piece,)), None)
    return [share for arrival in arrivals for share in arrival.payload.fetch(0)]


async def test_damage_and_what_this_release_does_not_know_are_noticed() -> None:
    [piece] = transport().pack(0, Ready(blocks(0, 4)))
    assert _fetched(piece) == list(piece.sections[MAIN])
    damaged = replace(piece, checksum=1)
    unknown = replace(piece, sections={**piece.sections, "draft": ()})
    short = KVPiece(start=0, end=9, sections=piece.sections)
    for wrong in (damaged, unknown, short):
        with pytest.raises(KVLostError):
            _fetched(wrong)


async def test_an_output_never_overtakes_the_kv_that_was_exported_before_it() -> None:
    subject = table()
    opened = await subject.open("t", 0)
    subject._exports.append(export(0, 8))  # on its way from the engine's thread
    subject.take_output(last_output())
    assert await spans(opened) == [[(0, 8)]]


async def test_what_nobody_calls_for_is_dropped_after_its_lease() -> None:
    subject = table(lease_s=0.2)
    await subject.open("t", 10 * TOKEN)
    subject.exported(export(0, 10))
    assert isinstance(await subject.chunk("t", 0, 0), KVChunk)
    assert subject.num_open == 1
    await asyncio.sleep(0.1)
    assert isinstance(await subject.chunk("t", 0, 0), KVChunk)  # renews it
    await asyncio.sleep(0.15)
    assert subject.num_open == 1
    await asyncio.sleep(0.15)
    assert subject.num_open == 0
    assert subject.metrics.snapshot().labelled["kv_transfer_failures"]["lease"] == 1
    assert subject.metrics.bytes_in_flight == 0
    await asyncio.wait_for(subject.open("u", 1 << 60), 5)  # the whole budget is free again


async def test_calls_may_come_before_the_one_that_opens_their_transfer() -> None:
    subject = table()
    early = asyncio.create_task(subject.chunk("t", 0, 0))
    await asyncio.sleep(0)
    await subject.open("t", 0)
    subject.exported(export(0, 10))
    assert isinstance(await asyncio.wait_for(early, 5), KVChunk)
    unknown = await table(lease_s=0.05).chunk("nothing", 0, 0)
    assert isinstance(unknown, NoChunk)
    assert unknown.failure


async def test_calls_that_are_given_up_before_their_transfer_is_opened_take_nobody_along() -> None:
    subject = table()
    leaves, stays = (asyncio.create_task(subject.chunk("t", 0, 0)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    await subject.open("t", 0)
    subject.exported(export(0, 10))
    assert isinstance(await asyncio.wait_for(stays, 5), KVChunk)
    alone = asyncio.create_task(subject.chunk("u", 0, 0))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.wait([alone])
    assert not subject._expected


async def test_prompts_wait_until_there_is_room_for_their_bytes_in_the_order_of_arrival() -> None:
    subject = table(max_tokens=10)
    await subject.open("a", 6 * TOKEN)
    b = asyncio.create_task(subject.open("b", 6 * TOKEN))
    c = asyncio.create_task(subject.open("c", 1 * TOKEN))
    await asyncio.sleep(0.01)
    assert not b.done()
    assert not c.done()  # it would fit, but came later
    subject.close("a")
    await asyncio.wait_for(asyncio.gather(b, c), 5)
    d = asyncio.create_task(subject.open("d", 100 * TOKEN))  # larger than all there is
    await asyncio.sleep(0.01)
    subject.close("b")
    subject.close("c")
    await asyncio.wait_for(d, 5)
