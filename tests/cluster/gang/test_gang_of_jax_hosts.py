"""Several JAX processes, placed and started by Ray, give what one gives: every feature, and KV from and for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.jax.backend import JaxBackend
from cluster.gang.backend import GangBackend
from cluster.gang.ray_kv import GivenPayload
from cluster.gang.ray_launcher import RayLauncher
from cluster.kv_transfer.object_store import PiecePayload
from engine.backend import Backend
from engine.config import EngineConfig
from engine.kv_connector import KVConnector
from engine.pools import prefill_config
from tests.backends.jax.engine import Answer, Engine, engine
from tests.backends.jax.test_tensor_parallel import SMALL, logprob_values, requests
from tests.backends.models import tiny_llama
from tests.cluster.apps import eventually
from tests.cluster.kv_transfer.pair import PrefillReplica
from tests.engine.loopback import DecodeConnector, PrefillEngine

OPTIONS: dict[str, Any] = {**SMALL, "backend": "cpu", "dtype": "float32", "compilation_cache_dir": "none"}


class JaxGang(GangBackend):
    """A gang whose leader is the test's process."""

    def __init__(self, config: EngineConfig) -> None:
        self.launcher = RayLauncher(config, name=f"sliceserve:test:{id(self)}:worker", log_level="WARNING")
        super().__init__(config, self.launcher)


@contextmanager
def gang(
    model: Path, hosts: int, chips: int, connector: KVConnector | None = None, **options: Any
) -> Iterator[tuple[Engine, RayLauncher]]:
    sizes = {"num_hosts": hosts, "tensor_parallel_size": chips, **options}
    with engine(make_backend=JaxGang, connector=connector, model=str(model), **{**OPTIONS, **sizes}) as running:
        yield running, running.backend.launcher


def assert_alike(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, reference in zip(answers, expected, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (reference.token_ids, reference.finish_reason)
        assert np.abs(logprob_values(answer) - logprob_values(reference)).max(initial=0) < 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_heads=8, num_kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    with engine(model=str(model), tensor_parallel_size=1, **SMALL) as running:
        return running.run(*requests())


@pytest.mark.matrix
def test_two_hosts_give_what_one_gives_and_end_together(serve_url: str, model: Path, expected: list[Answer]) -> None:
    assert serve_url
    fetching: list[bool] = []
    config = EngineConfig.from_args({**OPTIONS, "model": str(model), "block_size": 16})
    prefill = PrefillEngine(config, JaxBackend(config))
    connector = DecodeConnector(prefill, wants=lambda _: bool(fetching))
    with gang(model, 2, 4, connector, warmup=True) as (running, launcher):
        connector.receiver = running.backend
        assert running.info.device.startswith("cpu x4 on 2 hosts (float32")
        assert_alike(running.run(*requests()), expected)
        assert running.core.metrics().values["compilations_after_warmup"] == 0

        fetching.append(True)  # other prompts: those before are cached
        prompts, sampling = requests()
        others = [[token + 1 for token in prompt] for prompt in prompts]
        with engine(model=str(model), tensor_parallel_size=1, **SMALL) as alone:
            references = alone.run(others, sampling)
        assert_alike(running.run(others, sampling), references)
        assert connector.num_fetched >= len(prompts) // 2
        assert running.core.metrics().values["kv_import_failures"] == 0
        assert running.core.metrics().values["kv_imported_tokens"] > 100

        processes = list(launcher._processes)
        processes[1].kill()
        eventually(lambda: not running.core.health().healthy)
        assert "has died" in running.core.health().reason
        eventually(lambda: not any(process.is_running() for process in processes))
    prefill.stop()


@pytest.mark.matrix
@pytest.mark.parametrize(("hosts", "chips"), [(2, 2), (4, 4), (4, 8)])
def test_any_number_of_hosts_gives_what_one_gives(
    serve_url: str, model: Path, expected: list[Answer], hosts: int, chips: int
) -> None:
    assert serve_url
    with gang(model, hosts, chips) as (running, _):
        assert_alike(running.run(*requests()), expected)


@pytest.mark.matrix
def test_one_host_goes_on_with_what_two_have_computed(serve_url: str, model: Path, expected: list[Answer]) -> None:
    assert serve_url
    sizes = {"num_hosts": 2, "tensor_parallel_size": 4, "block_size": 16}
    config = EngineConfig.from_args({**OPTIONS, "model": str(model), **sizes})
    prefill = PrefillEngine(config, JaxGang(config))
    connector = DecodeConnector(prefill)
    with engine(model=str(model), connector=connector, **{**OPTIONS, "tensor_parallel_size": 1}) as running:
        assert_alike(running.run(*requests()), expected)
        assert running.core.metrics().values["kv_imported_tokens"] > 100
        assert running.core.metrics().values["kv_import_failures"] == 0
    prefill.stop()


POOLS = {"disagg_topo": "1,1", "disagg_min_prefill_tokens": 4, "kv_transfer_object_mib": 0}
POOLS |= {"kv_transfer_checksums": True, "kv_transfer_timeout_s": 100, "max_num_batched_tokens": 16}  # it compiles


def made(config: EngineConfig) -> Backend:
    return JaxGang(config) if config.num_hosts > 1 else JaxBackend(config)


def not_here(*_: object) -> Any:
    raise AssertionError("KV came to a leader")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((2, 2, 16), (2, 2, 16)),
        ((2, 2, 32), (2, 4, 8)),
        ((2, 4, 8), (1, 1, 32)),
        ((1, 1, 16), (2, 2, 8)),
    ],
    ids=["alike", "to more chips", "to one host", "from one host"],
)
def test_pools_of_hosts_give_what_one_engine_gives_and_leaders_have_none_of_their_kv(
    serve_url: str,
    model: Path,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
) -> None:
    assert serve_url
    names = ("num_hosts", "tensor_parallel_size", "block_size")
    sizes = dict(zip(names, decode, strict=True)) | {
        f"prefill_{name}": size for name, size in zip(names, prefill, strict=True)
    }
    config = EngineConfig.from_args({**OPTIONS, **POOLS, **sizes, "model": str(model)})
    if decode[0] > 1:
        monkeypatch.setattr(GivenPayload, "fetch", not_here)  # in this process, which leads both gangs
        monkeypatch.setattr(PiecePayload, "fetch", not_here)
    monkeypatch.setattr(RayLauncher, "collect", not_here)
    replica = PrefillReplica(prefill_config(config), made(prefill_config(config)))
    backend = made(config)
    connector = replica.connector(config, backend)
    with engine(make_backend=lambda _: backend, connector=connector, **config.model_dump()) as running:
        assert_alike(running.run(*requests()), expected)
        values, failures = connector.metrics().values, connector.metrics().labelled["kv_transfer_failures"]
        assert values["kv_transfers"] >= 4
        assert values["kv_transfer_bytes"] == values["kv_transfer_tokens"] * backend.kv_format().bytes_per_token
        assert not any(failures.values())
        assert running.core.metrics().values["kv_import_failures"] == 0
    replica.stop()
