"""The line between an ingress and an engine: all in order, complete, merged only when piled up, from friends only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest
import uvloop

from cluster import frames
from cluster.mailbox import Inbox, Line, Mailbox
from cluster.outbox import Connection, Outbox
from cluster.request_codec import pack_request, unpack_request
from cluster.sockets import LineAddress
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

LOGPROBS = (TokenLogprobs(token_id=7, logprob=-0.5, top=((7, -0.5), (9, -1.25))),)
FULL = RequestOutput(
    request_id="r",
    token_ids=(7,),
    logprobs=LOGPROBS,
    prompt_logprobs=(None, *LOGPROBS),
    finish_reason=FinishReason.STOP,
    stop_token_id=7,
    num_cached_tokens=32,
    error=None,
)


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Serve's replicas run uvloop."""
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


def tokens(*ids: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=ids, finish_reason=reason)


class Reader:
    """Notes what comes in at an engine."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[int, EngineRequest]] = asyncio.Queue()
        self.withdrawals: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.openings: list[Connection] = []
        self.lost_connections: list[Connection] = []

    def arrived(self, _: Connection, stream: int, request: EngineRequest) -> None:
        self.requests.put_nowait((stream, request))

    def withdrawn(self, _: Connection, request_id: str, *, is_finished: bool) -> None:
        self.withdrawals.put_nowait((request_id, is_finished))

    def opened(self, connection: Connection) -> None:
        self.openings.append(connection)

    def lost(self, connection: Connection) -> None:
        self.lost_connections.append(connection)


@pytest.fixture
async def reader():
    return Reader()


@pytest.fixture
async def line(reader: Reader):
    """A mailbox, an outbox, and the connections that the outbox lost."""
    mailbox, outbox = Mailbox(), Outbox("one", reader)
    await mailbox.start("127.0.0.1")
    yield mailbox, outbox, reader.lost_connections
    outbox.close()
    mailbox.close()


async def opened(mailbox: Mailbox, replica: str = "one"):
    """The ingress' end, once the engine has said who it is."""
    async with asyncio.timeout(5):
        while (here := mailbox.line(replica)) is None:
            await asyncio.sleep(0.01)
    return here


async def read(inbox: Inbox) -> RequestOutput:
    async with asyncio.timeout(5):
        await inbox.wait()
    output = inbox.take()
    assert output is not None
    return output


@pytest.mark.parametrize("output", [tokens(1), tokens(1, 2, reason=FinishReason.LENGTH), FULL])
def test_a_row_restores_the_output_that_it_was_made_of(output: RequestOutput) -> None:
    [[row]] = frames.Decoder().feed(frames.encode([frames.to_row(5, output)]))
    assert row[0] == 5
    assert frames.from_row("r", row) == output


def test_a_merged_output_has_everything_once_and_in_order() -> None:
    first = replace(FULL, finish_reason=None, stop_token_id=None)
    last = replace(FULL, token_ids=(8, 9), prompt_logprobs=None)
    merged = frames.merge([first, last])
    assert merged.token_ids == (7, 8, 9)
    assert merged.logprobs == LOGPROBS * 2
    assert merged.prompt_logprobs == FULL.prompt_logprobs
    assert merged.finish_reason is FinishReason.STOP


async def test_tokens_arrive_in_their_requests_inbox_in_order(line) -> None:
    mailbox, outbox, _ = line
    (one, inbox_one), (two, inbox_two) = mailbox.open("one"), mailbox.open("two")
    connection = await outbox.connect(mailbox.address)
    connection.post([(one, tokens(1)), (two, tokens(10))])
    assert (await read(inbox_one)).token_ids == (1,)
    for token in range(2, 500):
        connection.post([(one, tokens(token))])
    received: list[int] = []
    while len(received) < 498:
        output = await read(inbox_one)
        assert output.request_id == "one"
        received += output.token_ids
    assert received == list(range(2, 500))
    assert (await read(inbox_two)).token_ids == (10,)


async def test_what_piles_up_behind_a_full_socket_leaves_as_one_frame(line) -> None:
    mailbox, outbox, _ = line
    stream, inbox = mailbox.open("one")
    connection = await outbox.connect(mailbox.address)
    connection.pause_writing()  # what asyncio calls when the socket is full
    for token in range(100):
        connection.post([(stream, tokens(token))])
    connection.resume_writing()
    assert (await read(inbox)).token_ids == tuple(range(100))


async def test_requests_to_one_ingress_share_a_connection(line) -> None:
    mailbox, outbox, _ = line
    first, second = await asyncio.gather(outbox.connect(mailbox.address), outbox.connect(mailbox.address))
    assert first is second


async def test_tokens_for_a_request_that_is_gone_are_dropped(line) -> None:
    mailbox, outbox, _ = line
    gone, _ = mailbox.open("gone")
    here, inbox = mailbox.open("here")
    mailbox.discard(gone)
    connection = await outbox.connect(mailbox.address)
    connection.post([(gone, tokens(1)), (here, tokens(2))])
    assert (await read(inbox)).token_ids == (2,)


async def test_a_stranger_without_the_secret_delivers_nothing_and_is_cut_off(line) -> None:
    mailbox, outbox, lost = line
    stream, inbox = mailbox.open("one")
    address = LineAddress(host=mailbox.address.host, port=mailbox.address.port, secret="0" * 32)
    connection = await outbox.connect(address)
    connection.post([(stream, tokens(1))])
    async with asyncio.timeout(5):
        while not lost:
            await asyncio.sleep(0.01)
    assert lost == [connection]
    assert inbox.take() is None


async def test_garbage_on_the_port_does_no_harm(line) -> None:
    mailbox, outbox, _ = line
    _, writer = await asyncio.open_connection(mailbox.address.host, mailbox.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n\xc1\xff")
    await writer.drain()
    writer.close()
    stream, inbox = mailbox.open("one")
    connection = await outbox.connect(mailbox.address)
    connection.post([(stream, tokens(1))])
    assert (await read(inbox)).token_ids == (1,)


async def test_an_ingress_that_is_gone_is_noticed_and_can_be_connected_to_again(line) -> None:
    mailbox, outbox, lost = line
    connection = await outbox.connect(mailbox.address)
    connection.close()
    async with asyncio.timeout(5):
        while not lost:
            await asyncio.sleep(0.01)
    assert lost == [connection]
    assert await outbox.connect(mailbox.address) is not connection


async def test_an_unreachable_ingress_is_an_error_and_not_remembered(line) -> None:
    mailbox, outbox, _ = line
    mailbox.close()
    for _ in range(2):
        with pytest.raises(OSError):
            await outbox.connect(mailbox.address)


@pytest.mark.parametrize("full_socket", [False, True])
async def test_a_frame_of_any_size_arrives_whole_and_the_connection_goes_on(
    line, full_socket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIECE_BYTES", "MAX_BUFFER_BYTES"):  # frames of 20 MiB take seconds to make and to compare
        monkeypatch.setattr(frames, name, getattr(frames, name) // 16)
    mailbox, outbox, lost = line
    stream, inbox = mailbox.open("one")
    connection = await outbox.connect(mailbox.address)
    entry = TokenLogprobs(token_id=7, logprob=-0.5, top=tuple((token, -1.5) for token in range(1000, 1020)))
    large = RequestOutput(request_id="one", token_ids=(1,), prompt_logprobs=(None, *[entry] * 5_000))
    assert len(frames.encode([frames.to_row(stream, large)])) > frames.MAX_BUFFER_BYTES
    if full_socket:
        connection.pause_writing()
    connection.post([(stream, large)])
    if full_socket:
        connection.resume_writing()
    assert await read(inbox) == large
    connection.post([(stream, tokens(2))])
    assert (await read(inbox)).token_ids == (2,)
    assert not lost


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n"])
async def test_who_does_not_show_the_secret_in_time_is_cut_off(
    said: bytes, monkeypatch: pytest.MonkeyPatch, line
) -> None:
    mailbox, _, _ = line
    monkeypatch.setattr("cluster.mailbox.SECRET_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection(mailbox.address.host, mailbox.address.port)
    writer.write(said)
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_one_that_shows_the_secret_in_time_may_stay(monkeypatch: pytest.MonkeyPatch, line) -> None:
    mailbox, outbox, _ = line
    monkeypatch.setattr("cluster.mailbox.SECRET_TIMEOUT_S", 0.2)
    stream, inbox = mailbox.open("one")
    connection = await outbox.connect(mailbox.address)
    await asyncio.sleep(0.5)
    connection.post([(stream, tokens(1))])
    assert (await read(inbox)).token_ids == (1,)


@pytest.mark.parametrize("garbage", [b"\xc1", b"\xdd\xff\xff\xff\xff" + bytes(frames.MAX_BUFFER_BYTES + 1)])
def test_what_is_no_frame_is_one_kind_of_error(garbage: bytes) -> None:
    with pytest.raises(frames.FrameError):
        list(frames.Decoder().feed(garbage))


async def test_a_closed_mailbox_ends_its_connections(line) -> None:
    mailbox, outbox, lost = line
    connection = await outbox.connect(mailbox.address)
    await asyncio.sleep(0.1)
    mailbox.close()
    async with asyncio.timeout(5):
        while lost != [connection]:
            await asyncio.sleep(0.01)


UNUSUAL = SamplingParams(
    max_tokens=7,
    temperature=0.3,
    top_k=40,
    logit_bias={5: -100.0, 49151: 1.5},
    bad_words=((1, 2), (3,)),
    ignore_eos=True,
    stop_token_ids=(2, 7),
    seed=2**64 - 1,
    logprobs=5,
)


@pytest.mark.parametrize("prompt_tokens", [3, 200_000])
async def test_requests_arrive_over_the_line_as_they_were_sent(line, reader: Reader, prompt_tokens: int) -> None:
    mailbox, outbox, _ = line
    await outbox.connect(mailbox.address)
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=tuple(range(prompt_tokens)),
        sampling=UNUSUAL,
        output_token_ids=(9,),
        cache_salt="tenant",
    )
    here = await opened(mailbox)
    here.send(4, request)
    here.withdraw(4, "r")
    async with asyncio.timeout(5):
        assert await reader.requests.get() == (4, request)
        assert await reader.withdrawals.get() == ("r", False)


@pytest.mark.parametrize("sampling", [UNUSUAL, SamplingParams(max_tokens=1)])
def test_every_field_of_a_request_travels(sampling: SamplingParams) -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    [[row]] = frames.Decoder().feed(frames.encode([(1, pack_request(request))]))
    assert unpack_request(row[1]) == request


async def test_an_ingress_knows_which_engine_a_line_goes_to_and_when_it_is_gone(line) -> None:
    mailbox, outbox, _ = line
    assert mailbox.line("one") is None
    connection = await outbox.connect(mailbox.address)
    await opened(mailbox)
    assert mailbox.line("another") is None
    connection.close()
    async with asyncio.timeout(5):
        while mailbox.line("one") is not None:
            await asyncio.sleep(0.01)


async def test_no_request_leaves_over_a_line_that_is_full(line) -> None:
    mailbox, outbox, _ = line
    await outbox.connect(mailbox.address)
    here = await opened(mailbox)
    here.pause_writing()  # what asyncio calls when the socket is full
    assert mailbox.line("one") is None
    here.resume_writing()
    assert mailbox.line("one") is here


@pytest.mark.parametrize("garbage", [b"\xc1", frames.encode([(1, (1, 2))]), frames.encode([(1, 2, 3)])])
async def test_an_engine_hangs_up_on_an_ingress_that_talks_nonsense(line, reader: Reader, garbage: bytes) -> None:
    mailbox, outbox, lost = line
    connection = await outbox.connect(mailbox.address)
    connection.data_received(garbage)
    async with asyncio.timeout(5):
        while lost != [connection]:
            await asyncio.sleep(0.01)
    assert reader.requests.empty()


async def test_a_line_that_could_not_be_made_is_tried_anew_even_if_its_caller_had_left(reader: Reader) -> None:
    outbox = Outbox("one", reader)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = LineAddress(host="127.0.0.1", port=taken.getsockname()[1], secret="0" * 32)
        caller = asyncio.create_task(outbox.connect(address))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await asyncio.sleep(0.1)  # the connection is refused meanwhile
        taken.listen()
        connection = await outbox.connect(address)
        connection.close()
    outbox.close()


async def test_an_engine_with_nothing_to_send_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch, line) -> None:
    monkeypatch.setattr(frames, "SIGN_OF_LIFE_S", 0.02)
    mailbox, outbox, _ = line
    await outbox.connect(mailbox.address)
    here = await opened(mailbox)
    await asyncio.sleep(0.3)
    assert not here.is_lost


async def test_an_engine_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, line) -> None:
    monkeypatch.setattr(frames, "SIGN_OF_LIFE_S", 0.02)
    mailbox, _, _ = line
    reader, writer = await asyncio.open_connection(mailbox.address.host, mailbox.address.port)
    writer.write(mailbox.address.secret.encode() + frames.encode([("one",)]))
    here = await opened(mailbox)
    inbox = Inbox("r")
    here.watch(inbox)
    async with asyncio.timeout(5):
        await inbox.wait()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert here.is_lost
    writer.close()


def test_lines_come_and_go_while_another_thread_looks_for_one() -> None:
    mailbox, here = Mailbox(), LineAddress.new("127.0.0.1", 1)

    class Fleeting(Line):
        """While it is looked at, another comes, and it goes."""

        @property
        def replica(self) -> str:
            mailbox.connected(Line(here, mailbox))
            mailbox.disconnected(self)
            return ""

        @replica.setter
        def replica(self, name: str) -> None: ...

    for _ in range(3):
        mailbox.connected(Fleeting(here, mailbox))
    assert mailbox.line("a") is None
    assert mailbox.replicas == set()
