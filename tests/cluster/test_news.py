"""News of engines: what goes in at one end of a line comes out at the other; a line that was full misses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster import frames, news
from cluster.admissions import Admissions
from cluster.mailbox import Mailbox
from cluster.outbox import Outbox
from cluster.publisher import REPEAT_S, Publisher
from engine.kv_cache import BlockPool
from engine.news import CacheJournal, EngineLoad, EngineNews

LOAD = EngineLoad(running=3, waiting=70_000, queued_tokens=5_000_000, free_blocks=12)
IDLE = EngineLoad(running=0, waiting=0, queued_tokens=0, free_blocks=20)


def known(number: int) -> bytes:
    """A block's hash as engines have it."""
    return number.to_bytes(32, "little")


def short(*numbers: int) -> set[bytes]:
    return {known(number)[:8] for number in numbers}


class Hearer:
    """What one router has heard, by replica."""

    def __init__(self) -> None:
        self.loads: dict[str, EngineLoad] = {}
        self.caches: dict[str, set[bytes]] = {}
        self.told_all = 0

    def load_is(self, replica: str, load: EngineLoad) -> None:
        self.loads[replica] = load

    def cache_is(self, replica: str, hashes: Sequence[bytes]) -> None:
        self.caches[replica] = set(hashes)
        self.told_all += 1

    def cache_changed(self, replica: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.caches[replica] |= set(added)
        self.caches[replica] -= set(removed)

    def lost(self, replica: str) -> None:
        self.loads.pop(replica, None)
        del self.caches[replica]


class Engine:
    """Tells what a test says, once."""

    def __init__(self) -> None:
        self.load = LOAD
        self.cache: dict[bytes, bool] = {}

    def news(self) -> EngineNews:
        cache, self.cache = self.cache, {}
        return EngineNews(load=self.load, cache=cache)


class House:
    """One engine server, and ingresses that listen to it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.admissions = Admissions()
        self.admissions.attach(self.engine)  # type: ignore[arg-type]
        self.admissions._loop = asyncio.get_running_loop()
        self.outbox = Outbox("one", self.admissions)
        self.mailboxes: list[Mailbox] = []

    async def ingress(self) -> Hearer:
        hearer = Hearer()
        mailbox = Mailbox(hearer)
        self.mailboxes.append(mailbox)
        await self.outbox.connect(await mailbox.start("127.0.0.1"))
        return hearer

    def step(self, **changes: bool) -> None:
        self.engine.cache = {known(int(name[1:])): here for name, here in changes.items()}
        self.admissions.emit([])

    def close(self) -> None:
        self.outbox.close()
        for mailbox in self.mailboxes:
            mailbox.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    made.close()


async def soon(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "row", [news.load_row(LOAD), news.changes_row(short(1, 2), short(3)), news.cache_row(short(*range(100_000)))]
)
def test_a_row_says_at_one_end_what_was_said_at_the_other(row: frames.Row) -> None:
    [[arrived]] = frames.Decoder().feed(frames.encode([row]))
    hearer = Hearer()
    hearer.caches["r"] = short(3, 4)
    news.read_row(arrived, "r", hearer)
    match row[1]:
        case 0:
            assert hearer.loads == {"r": LOAD}
        case 1:
            assert hearer.caches == {"r": short(1, 2, 4)}
        case _:
            assert hearer.caches == {"r": short(*range(100_000))}


@pytest.mark.parametrize("row", [(0,), (0, 9, 1), (0, 0, 1, 2, 3), (0, 0, 1, 2, 3, "4"), (0, 1, b""), (0, 2, "text")])
def test_nonsense_is_refused(row: frames.Row) -> None:
    with pytest.raises((frames.FrameError, ValueError, TypeError)):
        news.read_row(row, "r", Hearer())


async def test_all_ingresses_hear_of_every_step_and_a_new_one_of_all_before(house: House) -> None:
    first = await house.ingress()
    house.step(b1=True, b2=True)
    house.step(b3=True, b1=False)
    await soon(lambda: first.caches == {"one": short(2, 3)} and first.loads == {"one": LOAD})
    second = await house.ingress()
    await soon(lambda: second.caches == first.caches and second.loads == first.loads)
    house.step(b4=True)
    await soon(lambda: second.caches == first.caches == {"one": short(2, 3, 4)})


async def test_a_line_that_was_full_is_told_all_when_it_has_room_again(house: House) -> None:
    hearer = await house.ingress()
    house.step(b1=True, b2=True)
    await soon(lambda: hearer.caches == {"one": short(1, 2)})
    [connection] = house.admissions._lines
    connection.pause_writing()  # what asyncio calls when the socket is full
    for number in range(10, 500):
        house.step(**{f"b{number}": True})
    house.step(b1=False)
    await asyncio.sleep(0.05)
    assert hearer.caches == {"one": short(1, 2)}
    connection.resume_writing()
    await soon(lambda: hearer.caches == {"one": short(2, *range(10, 500))})
    assert hearer.told_all == 2


async def test_what_is_heard_of_an_engine_ends_with_its_line(house: House) -> None:
    hearer = await house.ingress()
    house.step(b1=True)
    await soon(lambda: hearer.loads)
    [connection] = house.admissions._lines
    connection.close()
    await soon(lambda: not hearer.caches)
    assert not house.admissions._lines


async def test_an_ingress_hangs_up_on_an_engine_whose_news_make_no_sense(house: House) -> None:
    hearer = await house.ingress()
    await soon(lambda: hearer.caches)
    [connection] = house.admissions._lines
    connection.post((), [(0, 7, 7)])
    await soon(lambda: not house.admissions._lines)


def test_an_unchanged_load_is_repeated_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("cluster.publisher.time.monotonic", lambda: now)
    publisher = Publisher()
    step = EngineNews(load=LOAD, cache={})
    assert publisher.rows([step]) == [news.load_row(LOAD)]
    assert publisher.rows([step]) == []
    assert publisher.rows([step, EngineNews(load=IDLE, cache={})]) == [news.load_row(IDLE)]
    now += REPEAT_S
    assert publisher.rows([EngineNews(load=IDLE, cache={})]) == [news.load_row(IDLE)]


def test_a_block_that_comes_and_goes_between_two_calls_is_gone() -> None:
    publisher = Publisher()
    steps = [{known(1): True, known(2): True}, {known(1): False}, {known(2): False}, {known(2): True}]
    rows = publisher.rows([EngineNews(load=LOAD, cache=cache) for cache in steps])
    assert rows[1] == news.changes_row(short(2), short(1))


def test_a_journal_has_the_changes_of_the_pool() -> None:
    journal = CacheJournal()
    pool = BlockPool(2, journal=journal)
    blocks = pool.allocate(2)
    pool.register(blocks[0], known(1))
    pool.register(blocks[1], known(1))  # known already
    assert journal.take() == {known(1): True}
    assert journal.take() == {}
    pool.release(blocks)
    pool.allocate(2)
    assert journal.take() == {known(1): False}
