"""A prefill and a decode engine in one process, with everything between them but Ray."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.mock import MockBackend, mock_tokens
from cluster.kv_transfer.decode_connector import DecodeConnector
from cluster.kv_transfer.messages import KVChunk, NoChunk, PrefillAnswer, PrefillOrder, TransferTicket
from cluster.kv_transfer.metrics import TransferMetrics
from cluster.kv_transfer.object_store import MIB, ObjectStoreTransport
from cluster.kv_transfer.prefill_connector import PrefillConnector
from cluster.kv_transfer.prefill_pool import PrefillError, PrefillPool
from cluster.kv_transfer.table import TransferTable
from cluster.kv_transfer.threshold import PrefillThreshold
from cluster.messages import Refusal
from cluster.prefill_desk import PrefillDesk
from cluster.roles import Role
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.pools import prefill_config
from engine.request import EngineRequest, RequestOutput, SamplingParams
from tests.cluster.apps import eventually

OPTIONS: dict[str, Any] = {
    "backend": "mock",
    "disagg_topo": "1,1",
    "disagg_min_prefill_tokens": 30,
    "kv_transfer_object_mib": 0,
    "max_decode_seqs": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "num_blocks": 64,
    "prefill_block_size": 8,
    "prefill_max_num_batched_tokens": 48,
    "prefill_num_blocks": 200,
}


class DeskPool(PrefillPool):
    """Calls a desk as Serve would."""

    def __init__(self, desk: PrefillDesk) -> None:
        self._desk = desk

    async def choose(self, request: EngineRequest, transfer: str) -> str:  # noqa: ARG002
        return "p"

    async def prefill(self, ticket: TransferTicket, order: PrefillOrder) -> PrefillAnswer:
        answer = await self._desk.prefill(ticket, order)
        if isinstance(answer, Refusal):
            raise PrefillError("refused", answer.message)
        return answer

    async def fetch(self, ticket: TransferTicket, index: int, num_received: int) -> tuple[KVChunk | NoChunk, object]:
        return await self._desk.fetch(ticket, index, num_received), None

    def suspect(self, replica: str) -> bool:
        raise AssertionError(f"{replica} has done nothing wrong")

    def close(self, ticket: TransferTicket) -> None:
        self._desk.close(ticket)


class Pair:
    def __init__(self, **options: Any) -> None:
        config = EngineConfig.from_args({**OPTIONS, **options})
        transport, max_bytes = ObjectStoreTransport.of(config), config.kv_transfer_max_mib * MIB
        self.table = TransferTable(transport, TransferMetrics(Role.PREFILL), max_bytes=max_bytes, lease_s=1)
        desk = PrefillDesk(self.table)
        own = prefill_config(config)
        self.prefill = EngineCore(own, MockBackend(own, check=True), desk.emit, PrefillConnector(self.table))
        backend = MockBackend(config, check=True)
        self.connector = DecodeConnector(
            "d",
            backend.kv_format,
            lambda: DeskPool(desk),
            transport,
            PrefillThreshold(config.disagg_min_prefill_tokens),
            TransferMetrics(Role.DECODE),
            max_bytes=max_bytes,
            timeout_s=config.kv_transfer_timeout_s,
        )
        self.outputs: queue.Queue[list[RequestOutput]] = queue.Queue()
        self.decode = EngineCore(config, backend, self.outputs.put, self.connector)
        for engine in (self.prefill, self.decode):
            engine.load()
            engine.start()
        desk.attach(self.prefill)

    def collect(self, names: set[str]) -> dict[str, list[int]]:
        """The tokens of these requests, when all have ended."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        left = set(names)
        while left:
            for output in self.outputs.get(timeout=20):
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    left.discard(output.request_id)
        return tokens


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    subject = Pair(**options)
    try:
        yield subject
    finally:
        subject.decode.stop()
        subject.prefill.stop()


def submit(subject: Pair, rng: random.Random, number: int) -> tuple[str, list[int]]:
    """A random request; gives its name and what it must yield."""
    prompt = tuple(rng.randrange(3, 900) for _ in range(rng.randrange(1, 300)))
    count, seed = rng.randrange(1, 30), rng.randrange(1, 1000)
    known = tuple(mock_tokens(prompt, count, seed=seed))
    resumed = rng.randrange(count) if rng.random() < 0.3 else 0
    sampling = SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, logprobs=2 if number % 3 else None)
    name = f"r{number}"
    subject.decode.submit(
        EngineRequest(request_id=name, prompt_token_ids=prompt, output_token_ids=known[:resumed], sampling=sampling)
    )
    return name, list(known[resumed:])


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_and_aborts_yield_what_one_engine_yields_and_leave_both_engines_empty(seed: int) -> None:
    rng = random.Random(seed)
    with pair() as subject:
        expected = dict(submit(subject, rng, number) for number in range(60))
        aborted = set(rng.sample(sorted(expected), 20))
        for name in aborted:
            subject.decode.abort(name)
        answers = subject.collect(set(expected))
        for name, tokens in answers.items():
            assert tokens == expected[name][: len(tokens)]
            assert name in aborted or len(tokens) == len(expected[name])
        assert subject.connector.metrics().values["kv_transfers"] > 10
        assert not any(subject.connector.metrics().labelled["kv_transfer_failures"].values())
        for engine in (subject.prefill, subject.decode):
            wait_until_empty(engine)
        assert subject.table.num_open == 0


def wait_until_empty(engine: EngineCore) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    eventually(lambda: not any(engine.metrics().values[name] for name in names), 5)


def test_a_prompt_that_prefill_refuses_is_computed_by_decode() -> None:
    with pair(prefill_num_blocks=10) as subject:  # 80 tokens of context
        prompt = tuple(range(3, 203))
        sampling = SamplingParams(max_tokens=5, temperature=0)
        subject.decode.submit(EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling))
        assert subject.collect({"r"})["r"] == mock_tokens(prompt, 5)
        assert subject.connector.metrics().labelled["kv_transfer_failures"]["refused"] == 1


def test_decode_without_room_for_more_kv_waits_and_loses_nothing() -> None:
    rng = random.Random(5)
    with pair(num_blocks=16, max_model_len=400) as subject:
        expected = dict(submit(subject, rng, number) for number in range(20))
        assert subject.collect(set(expected)) == expected
