"""A real model over the store: KV of one engine gives another one, of other tensor parallelism, the same text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.jax.backend import JaxBackend
from cluster.prefix_store.connector import PrefixStoreConnector
from engine.config import EngineConfig
from engine.request import SamplingParams
from tests.backends.jax.engine import Engine
from tests.backends.models import tiny_llama
from tests.cluster.apps import eventually
from tests.cluster.prefix_store.fake_store import FakeClient, FakeStore


@contextmanager
def engine(store: FakeStore, model: Path, chips: int) -> Iterator[Engine]:
    options = {"model": str(model), "backend": "cpu", "dtype": "float32", "kv_store": "object_store"}
    options |= {
        "tensor_parallel_size": chips,
        "num_blocks": 64,
        "max_decode_seqs": 4,
        "max_num_batched_tokens": 128,
        "warmup": False,
    }
    config = EngineConfig.from_args(options)
    backend = JaxBackend(config)
    connector = PrefixStoreConnector(config, backend, FakeClient(store))
    made = Engine(make_backend=lambda _: backend, connector=connector, **options)
    try:
        eventually(lambda: connector._follower.space is not None)
        yield made
    finally:
        made.core.stop()


def test_a_prefix_from_the_store_gives_the_text_of_the_engine_that_computed_it(tmp_path: Path) -> None:
    model, store = tiny_llama(tmp_path / "model"), FakeStore()
    prompt = [random.Random(0).randrange(320) for _ in range(350)]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    with engine(store, model, chips=2) as warm:
        [first] = warm.run([prompt], greedy)
        [second] = warm.run([prompt], drawn)
        eventually(lambda: store.directory.num_blocks >= 10)
        assert first.num_cached_tokens == 0
    with engine(store, model, chips=1) as cold:
        [answer] = cold.run([prompt], greedy)
        assert answer.num_cached_tokens == 320
        assert answer.token_ids == first.token_ids
        [answer] = cold.run([prompt], drawn)
        assert answer.token_ids == second.token_ids


def test_another_models_kv_is_not_found(tmp_path: Path) -> None:
    store = FakeStore()
    prompt = [random.Random(0).randrange(320) for _ in range(350)]
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    for seed in (0, 1):
        with engine(store, tiny_llama(tmp_path / str(seed), seed=seed), chips=1) as one:
            [answer] = one.run([prompt], sampling)
            assert answer.num_cached_tokens == 0
            eventually(lambda seed=seed: store.directory.num_blocks >= 10 * (seed + 1))
