"""KV from host to host: each gets the heads it keeps, the leaders get none, and nobody keeps what nobody needs."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from cluster.gang.backend import GangBackend
from cluster.gang.kv import GangBlocks, KVHost, KVSlice
from cluster.kv_transfer.messages import KVChunk, KVPiece
from cluster.kv_transfer.object_store import ObjectStoreTransport
from engine.backend import Backend
from engine.config import EngineConfig
from engine.kv_blocks import KVBlocks, KVLateError, KVLostError, KVPayload, LocalPayload, RemotePayload
from tests.cluster.apps import eventually
from tests.cluster.gang.local_gang import LocalLauncher
from tests.cluster.kv_backend import BLOCK_SIZE, KVBackend
from tests.cluster.kv_transfer.kv import FORMAT, blocks
from tests.garbage import no_search_for_cycles, search_of_new_objects

ONE = ((range(4),),)
TWO = ((range(1), range(1, 2)), (range(2, 3), range(3, 4)))  # two chips each
FOUR = tuple((range(head, head + 1),) for head in range(4))
DOUBLED = ((range(2),), (range(2),), (range(2, 4),), (range(2, 4),))  # more chips than heads
PADDED = ((range(2),), (range(2, 4),), ())  # the last host's chips have no heads of their own
BLOCK_IDS = [3, 9, 4, 11, 1]


@contextmanager
def gang(hosts: Sequence[Sequence[range]]) -> Iterator[tuple[GangBackend, LocalLauncher, list[KVBackend]]]:
    count = len(hosts)
    config = EngineConfig.from_args({"backend": "mock", "num_hosts": count, "tensor_parallel_size": count})
    backends = [KVBackend(FORMAT, heads) for heads in hosts]
    launcher = LocalLauncher(backends)
    backend = GangBackend(config, launcher)
    backend.load()
    try:
        yield backend, launcher, backends
    finally:
        backend.close()


def filled(backends: Sequence[KVBackend]) -> None:
    """The same on all hosts, and each number once; what a host does not keep, it does not give."""
    for backend in backends:
        backend.cache[...] = np.arange(backend.cache.size, dtype=np.uint16).reshape(backend.cache.shape)


def tokens_of(cache: np.ndarray, heads: range) -> np.ndarray:
    places = [block * BLOCK_SIZE + index for block in BLOCK_IDS for index in range(BLOCK_SIZE)]
    return cache[:, :, heads.start : heads.stop, places]


def holds(backend: KVBackend, heads: range, expected: np.ndarray) -> bool:
    return bool((tokens_of(backend.cache, heads) == expected).all())


def chunk_of(transport: ObjectStoreTransport, backend: Backend) -> KVChunk:
    """Two reads, cut to pieces of at most six tokens' KV per host."""
    pieces: list[KVPiece] = []
    for start, blocks_read, num_tokens, offset in ((0, BLOCK_IDS[:3], 11, 0), (11, BLOCK_IDS[2:], 9, 3)):
        pieces += transport.pack(start, backend.read_blocks(blocks_read, num_tokens, offset))
    return KVChunk(pieces=tuple(pieces))


def on_shelves(launcher: LocalLauncher) -> int:
    return sum(len(host.reads) + len(host.payloads) for host in launcher.hosts)


@pytest.mark.parametrize(
    "source", [TWO, FOUR, DOUBLED, PADDED], ids=["from 2", "from 4", "from doubled", "from padded"]
)
@pytest.mark.parametrize("target", [ONE, TWO, FOUR, DOUBLED, PADDED], ids=["1", "2", "4", "doubled", "padded"])
def test_each_host_gets_the_heads_it_keeps_and_the_leaders_get_none(
    source: Sequence[Sequence[range]], target: Sequence[Sequence[range]]
) -> None:
    transport = ObjectStoreTransport(checksums=True, min_bytes=0, max_bytes=6 * FORMAT.bytes_per_token // len(source))
    with (
        search_of_new_objects(),
        gang(source) as (prefill, here, senders),
        gang(target) as (decode, there, receivers),
    ):
        filled(senders)
        chunk = chunk_of(transport, prefill)
        assert chunk.num_bytes == 20 * FORMAT.bytes_per_token
        assert len(chunk.pieces) > 2
        [arrival] = transport.unpack(chunk, None)
        assert (arrival.start, arrival.end) == (0, 20)
        [payload] = decode.receive_blocks([arrival.payload], 5)
        decode.write_blocks(BLOCK_IDS, 0, payload)
        eventually(lambda: not sum(len(host.payloads) for host in there.hosts), 2)
        for backend in receivers:
            heads = backend.kv_heads()
            eventually(partial(holds, backend, heads, tokens_of(senders[0].cache, heads)), 2)
            backend.cache[:, :, heads.start : heads.stop] = 0
            assert not backend.cache.any()
        assert here.num_collected == there.num_collected == 0
        sizes = {sum(len(share.heads) for share in given) for given in here.given}
        owners, keepers = ({heads for heads in each if heads} for each in (source, target))
        assert sizes - {1} <= {min(4 // len(owners), 4 // len(keepers))}  # a host without heads is sent one
        del chunk, arrival, payload
        gc.collect()
        eventually(lambda: not on_shelves(here), 2)  # without another command


class OneHost(KVHost):
    """A prefill replica without a gang."""

    def __init__(self, transport: ObjectStoreTransport, chunk: KVChunk) -> None:
        self._transport = transport
        self._chunk = chunk
        self.asked: list[tuple[int, range]] = []

    def ask(self, slices: Sequence[KVSlice], heads: range, *, checksum: bool) -> KVPayload:  # noqa: ARG002
        self.asked.append((slices[0].key, heads))
        return LocalPayload(blocks=self._transport.give(self._chunk, heads).shares)


def test_a_gangs_hosts_get_of_one_host_the_heads_they_keep() -> None:
    transport = ObjectStoreTransport(checksums=True, min_bytes=0)
    sender = KVBackend(FORMAT)
    filled([sender])
    with gang(TWO) as (decode, _, receivers):
        chunk = chunk_of(transport, sender)
        described = transport.describe(7, chunk)
        assert described.num_bytes == chunk.num_bytes
        replica = OneHost(transport, chunk)
        [arrival] = transport.unpack(described, replica)
        [payload] = decode.receive_blocks([arrival.payload], 5)
        decode.write_blocks(BLOCK_IDS, 0, payload)
        assert replica.asked == [(7, range(2)), (7, range(2, 4))]
        for backend in receivers:
            heads = backend.kv_heads()
            eventually(partial(holds, backend, heads, tokens_of(sender.cache, heads)), 2)


class Late(RemotePayload):
    """Comes when it is told to."""

    def __init__(self, shares: Sequence[KVBlocks]) -> None:
        self.comes = threading.Event()
        self._shares = shares

    def fetch(self, timeout_s: float) -> Sequence[KVBlocks]:  # noqa: ARG002
        assert self.comes.wait(10)
        return self._shares


class ForOneHost(KVPayload):
    """Is one thing for the host that keeps head 0, and another for the others."""

    def __init__(self, first: KVPayload, others: KVPayload) -> None:
        self._parts = first, others

    def part(self, heads: range) -> KVPayload:
        return self._parts[heads.start > 0]

    def shares(self) -> Sequence[KVBlocks]:
        raise NotImplementedError


class Lost(KVPayload):
    def shares(self) -> Sequence[KVBlocks]:
        raise KVLostError("the object is lost")


def test_kv_that_is_lost_for_one_host_is_told_before_the_engine_counts_on_it() -> None:
    whole = LocalPayload(blocks=blocks(0, 8))
    with gang(TWO) as (decode, launcher, _):
        with pytest.raises(KVLostError, match="the object is lost"):
            decode.receive_blocks([whole, ForOneHost(whole, Lost())], 5)
        eventually(lambda: not on_shelves(launcher), 2)
        half = LocalPayload(blocks=blocks(0, 8, cut=2)[:1])
        with pytest.raises(KVLostError, match=r"without heads \[2, 3\]"):
            decode.receive_blocks([half], 5)
        eventually(lambda: not on_shelves(launcher), 2)
        assert decode.problem is None
        with pytest.raises(KVLostError, match="was not brought to the hosts"):
            decode.write_blocks([0, 1], 0, whole)


@pytest.mark.parametrize("failure", [KVLostError("the object is lost"), KVLateError("not within 1 s")])
def test_what_did_not_come_is_held_in_no_cycle(failure: KVLostError) -> None:
    """An idle engine's Python looks for cycles late or never, and knows nothing of what an object store holds."""

    class Fails(KVPayload):
        def shares(self) -> Sequence[KVBlocks]:
            raise type(failure)(*failure.args)

    with gang(TWO) as (decode, launcher, _):
        whole = LocalPayload(blocks=blocks(0, 8))
        data = weakref.ref(whole.blocks[0].data)
        with no_search_for_cycles():
            with contextlib.suppress(type(failure)):
                decode.receive_blocks([whole, ForOneHost(whole, Fails())], 5)
            del whole
            eventually(lambda: data() is None, 2)
            assert not on_shelves(launcher)


def test_a_host_that_gets_its_kv_too_late_keeps_nobody_waiting_and_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.gang.backend.ANSWER_S", 0.1)
    late = Late(blocks(0, 8))
    with gang(TWO) as (decode, launcher, _):
        started = time.monotonic()
        with pytest.raises(KVLateError, match=r"not with all hosts within 0.1 s"):
            decode.receive_blocks([ForOneHost(LocalPayload(blocks=blocks(0, 8)), late)], 0.1)
        assert time.monotonic() - started < 2
        late.comes.set()
        time.sleep(0.1)
        eventually(lambda: not on_shelves(launcher), 2)


def test_kv_that_is_not_written_after_all_is_dropped_by_the_hosts() -> None:
    with gang(TWO) as (decode, launcher, _):
        [payload] = decode.receive_blocks([LocalPayload(blocks=blocks(0, 8))], 5)
        assert on_shelves(launcher) == 2
        del payload
        eventually(lambda: not on_shelves(launcher), 2)


def test_kv_that_was_dropped_meanwhile_is_not_given() -> None:
    transport = ObjectStoreTransport(checksums=False, min_bytes=0)
    with gang(TWO) as (prefill, launcher, _):
        read = prefill.read_blocks(BLOCK_IDS, 20)
        assert isinstance(read, GangBlocks)
        pieces = transport.pack(0, read)
        [arrival] = transport.unpack(KVChunk(pieces=tuple(pieces)), None)
        for host in launcher.hosts:
            host.reads.drop(range(10))
        with pytest.raises(KVLostError, match="does not keep this KV any more"):
            arrival.payload.fetch(1)
