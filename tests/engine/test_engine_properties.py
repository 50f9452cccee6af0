"""Random arrivals, aborts, preemptions, prefix sharing, chunk sizes, and KV that comes from elsewhere, late, in part or
not at all: nothing leaks, and nobody's text changes."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.backend import Capabilities
from engine.kv_connector import KVDemand
from tests.engine.driver import EOS, Driver
from tests.engine.fake_connector import Behaviour, FakeConnector, mock_kv

FAMILIES = [[100 + family * 500 + index for index in range(200)] for family in range(3)]
"""Prompts are prefixes of these with a few tokens of their own, so that they share blocks."""


def random_behaviour(rng: random.Random) -> Behaviour | None:
    """How a fetch goes; well, more often than not."""
    if rng.random() < 0.2:
        return None
    return Behaviour(
        sizes=[rng.choice([1, 3, 8, 13, 32]) for _ in range(3)],
        leaves_out=rng.choice([0, 0, 0, 1, 9, 1000]),
        lost=rng.choice([None, None, None, 0, 1]),
        gap=rng.choice([None, None, None, None, 1]),
        first_token=rng.random() < 0.7,
        failure=rng.choice([None, None, "the prefill replica died"]),
    )


class RandomTraffic(RuleBasedStateMachine):
    driver: Driver

    @initialize(
        num_blocks=st.integers(12, 40),
        step_tokens=st.sampled_from([16, 24, 64, 200]),
        rows=st.integers(1, 8),
        prefill_rows=st.integers(1, 4),
        chunked=st.booleans(),
        mixed=st.booleans(),
        caching=st.booleans(),
        overlap=st.booleans(),
        eos_every=st.sampled_from([0, 5, 40]),
        exchange=st.one_of(st.none(), st.randoms(use_true_random=False)),
    )
    def start(
        self,
        num_blocks: int,
        step_tokens: int,
        rows: int,
        prefill_rows: int,
        chunked: bool,
        mixed: bool,
        caching: bool,
        overlap: bool,
        eos_every: int,
        exchange: random.Random | None,
    ) -> None:
        connector = None
        if exchange is not None:
            rng = random.Random(exchange.random())

            def behave(_: KVDemand) -> Behaviour | None:
                return random_behaviour(rng)

            connector = FakeConnector(behave, eos=(EOS, eos_every))
        self.connector = connector
        self.driver = Driver(
            overlap=overlap,
            eos_every=eos_every,
            capabilities=Capabilities(mixed_batches=mixed, overlap=overlap, kv_exchange=True),
            connector=connector,
            num_blocks=num_blocks,
            max_num_batched_tokens=step_tokens,
            max_decode_seqs=rows,
            max_prefill_seqs=prefill_rows,
            enable_chunked_prefill=chunked,
            enable_prefix_cache_hbm=caching,
        )
        self.aborted: set[str] = set()
        self.longest_prompt = min(self.driver.info.max_model_len - 1, *([] if chunked else [step_tokens]), 100)

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.sampled_from([1, 8, 15, 16, 24, 40, 71, 80]),
        own=st.sampled_from([0, 0, 1, 5, 20]),
        salt=st.sampled_from(["", "", "tenant"]),
        max_tokens=st.integers(0, 60),
        min_tokens=st.sampled_from([0, 0, 8]),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0.0, 0.7]),
        prompt_logprobs=st.sampled_from([None, None, None, 2]),
        logprobs=st.sampled_from([None, None, 2]),
        resumes=st.sampled_from([0, 0, 0, 5]),
        export_from=st.sampled_from([None, None, 0, 3, 16]),
    )
    def submit(
        self,
        family: list[int],
        shared: int,
        own: int,
        salt: str,
        seed: int,
        resumes: int,
        export_from: int | None,
        **sampling: object,
    ) -> None:
        prompt = (family[:shared] + [seed % 1000 + index for index in range(own)])[: self.longest_prompt]
        name = self.driver.submit(prompt, cache_salt=salt, seed=seed, export_from=export_from, **sampling)
        already = self.driver.expected(name)[:resumes]
        if already and len(already) < len(self.driver.expected(name)):
            self.driver.abort(name)
            self.aborted.add(name)
            self.driver.submit(prompt, cache_salt=salt, seed=seed, output_token_ids=tuple(already), **sampling)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [name for name in self.driver.states if name not in self.aborted and self.driver.reason(name) is None]
        if live:
            name = data.draw(st.sampled_from(live))
            self.driver.abort(name)
            self.aborted.add(name)

    @precondition(lambda self: self.connector is not None and self.connector.pending)
    @rule(count=st.integers(1, 6), rng=st.randoms(use_true_random=False))
    def kv_arrives(self, count: int, rng: random.Random) -> None:
        assert self.connector is not None
        self.connector.release(rng, count)

    @precondition(lambda self: self.driver.scheduler.has_work or self.driver.in_flight)
    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()
            self.driver.assert_consistent()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "driver"):
            self.driver.assert_consistent()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.driver.assert_empty()
        for name in self.driver.states:
            tokens, expected = self.driver.tokens(name), self.driver.expected(name)
            if name in self.aborted:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                assert [o.finish_reason for o in self.driver.outputs[name]].count(None) == len(
                    self.driver.outputs[name]
                ) - 1
                self.check_export(name)
            assert all(output.num_cached_tokens % 8 == 0 for output in self.driver.outputs[name])

    def check_export(self, name: str) -> None:
        """A request that wants its prompt's KV handed out, and has ended, has had all of it handed out once."""
        request = self.driver.states[name].request
        if self.connector is None or request.export_from is None:
            return
        prompt, exported = request.prompt_token_ids, self.connector.exports.get(name)
        if request.export_from >= len(prompt):
            assert exported is None
            return
        assert exported is not None
        starts, ends = zip(*exported.ranges, strict=True)
        assert (request.export_from, *ends) == (*starts, len(prompt))
        assert np.array_equal(exported.data, mock_kv(prompt)[:, :, :, request.export_from :])


RandomTraffic.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRandomTraffic = RandomTraffic.TestCase
