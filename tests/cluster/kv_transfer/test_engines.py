"""A prefill and a decode engine in one process, with everything between them but Ray."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.mock import MockBackend, mock_tokens
from cluster.gang.backend import GangBackend
from engine.backend import Backend
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.pools import prefill_config
from engine.request import EngineRequest, RequestOutput, SamplingParams
from tests.cluster.apps import eventually
from tests.cluster.gang.local_gang import LocalLauncher
from tests.cluster.kv_transfer.pair import PrefillReplica

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


class Pair:
    def __init__(self, **options: Any) -> None:
        config = EngineConfig.from_args({**OPTIONS, **options})
        own = prefill_config(config)
        self.launchers: list[LocalLauncher] = []  # of gangs
        self._replica = PrefillReplica(own, self._backend(own))
        self.prefill, self.table = self._replica.engine, self._replica.table
        backend = self._backend(config)
        self.connector = self._replica.connector(config, backend)
        self.outputs: queue.Queue[list[RequestOutput]] = queue.Queue()
        self.decode = EngineCore(config, backend, self.outputs.put, self.connector)
        self.decode.load()
        self.decode.start()

    def stop(self) -> None:
        self.decode.stop()
        self._replica.stop()

    def _backend(self, config: EngineConfig) -> Backend:
        hosts = [MockBackend(config, check=True) for _ in range(config.num_hosts)]
        if len(hosts) == 1:
            return hosts[0]
        self.launchers.append(LocalLauncher(hosts))
        return GangBackend(config, self.launchers[-1])

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
        subject.stop()


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


def yield_what_one_engine_yields(subject: Pair, rng: random.Random, num_requests: int) -> None:
    """Random requests of which a third is given up: what comes is right, and many come by a transfer."""
    expected = dict(submit(subject, rng, number) for number in range(num_requests))
    aborted = set(rng.sample(sorted(expected), num_requests // 3))
    for name in aborted:
        subject.decode.abort(name)
    for name, tokens in subject.collect(set(expected)).items():
        assert tokens == expected[name][: len(tokens)]
        assert name in aborted or len(tokens) == len(expected[name])
    assert subject.connector.metrics().values["kv_transfers"] > num_requests // 6
    assert not any(subject.connector.metrics().labelled["kv_transfer_failures"].values())


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_and_aborts_yield_what_one_engine_yields_and_leave_both_engines_empty(seed: int) -> None:
    rng = random.Random(seed)
    with pair() as subject:
        yield_what_one_engine_yields(subject, rng, 60)
        for engine in (subject.prefill, subject.decode):
            wait_until_empty(engine)
        assert subject.table.num_open == 0


@pytest.mark.parametrize("hosts", [(2, 2), (2, 1), (1, 2)], ids=["gangs", "prefill gang", "decode gang"])
def test_pools_of_gangs_yield_the_same_and_leave_nothing_with_their_hosts(hosts: tuple[int, int]) -> None:
    rng = random.Random(sum(hosts))
    prefill, decode = ({"num_hosts": count, "tensor_parallel_size": count} for count in hosts)
    with pair(**decode, **{f"prefill_{name}": value for name, value in prefill.items()}) as subject:
        yield_what_one_engine_yields(subject, rng, 30)
        eventually(lambda: subject.table.num_open == 0, 5)
        members = [host for launcher in subject.launchers for host in launcher.hosts]
        eventually(lambda: not any(len(host.reads) + len(host.payloads) for host in members), 5)
        assert not any(launcher.num_collected for launcher in subject.launchers)


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


@pytest.mark.parametrize("step_tokens", [512, 48])
def test_a_prompt_with_more_kv_than_may_be_under_way_comes_from_prefill_all_the_same(step_tokens: int) -> None:
    limits = {"mock_kv_bytes_per_token": 8192, "kv_transfer_max_mib": 1, "prefill_max_num_batched_tokens": step_tokens}
    with pair(**limits) as subject:
        expected = {}
        for name, first in (("a", 3), ("b", 500)):
            prompt = tuple(range(first, first + 400))
            expected[name] = mock_tokens(prompt, 5)
            sampling = SamplingParams(max_tokens=5, temperature=0)
            subject.decode.submit(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        assert subject.collect(set(expected)) == expected
        assert subject.connector.metrics().values["kv_transfers"] == 2
        assert not any(subject.connector.metrics().labelled["kv_transfer_failures"].values())
        eventually(lambda: subject.table.num_open == 0, 5)
