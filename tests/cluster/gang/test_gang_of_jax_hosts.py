"""Several JAX processes give what one gives: tokens and log-probabilities of every feature, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cluster.gang.backend import GangBackend
from engine.config import EngineConfig
from tests.backends.jax.engine import Answer, engine
from tests.backends.jax.test_tensor_parallel import FEATURES, SMALL, logprob_values, requests
from tests.backends.models import tiny_llama
from tests.cluster.apps import eventually
from tests.cluster.gang.process_gang import ProcessLauncher


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_heads=8, num_kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def on_one_host(model: Path) -> list[Answer]:
    with engine(model=str(model), tensor_parallel_size=1, **SMALL) as running:
        return running.run(*requests())


@pytest.mark.parametrize(
    ("hosts", "chips"),
    [
        (2, 4),
        pytest.param(2, 2, marks=pytest.mark.matrix),
        pytest.param(4, 4, marks=pytest.mark.matrix),
        pytest.param(4, 8, marks=pytest.mark.matrix),
    ],
)
def test_every_feature_gives_on_several_hosts_what_it_gives_on_one(
    model: Path, on_one_host: list[Answer], tmp_path: Path, hosts: int, chips: int
) -> None:
    launchers: list[ProcessLauncher] = []

    def gang(config: EngineConfig) -> GangBackend:
        launchers.append(ProcessLauncher(config, tmp_path / "host"))
        return GangBackend(config, launchers[0])

    options = {**SMALL, "warmup": True, "compilation_cache_dir": "none", "model": str(model)}
    with engine(make_backend=gang, num_hosts=hosts, tensor_parallel_size=chips, **options) as running:
        assert running.info.device.startswith(f"cpu x{chips} on {hosts} hosts (float32")
        assert len(on_one_host) == len(FEATURES)
        for answer, reference in zip(running.run(*requests()), on_one_host, strict=True):
            assert (answer.token_ids, answer.finish_reason) == (reference.token_ids, reference.finish_reason)
            difference = np.abs(logprob_values(answer) - logprob_values(reference))
            assert difference.max(initial=0) < 1e-4
        assert running.core.metrics().values["compilations_after_warmup"] == 0

        [launcher] = launchers
        launcher.processes[1].kill()
        eventually(lambda: running.core.health().reason == "host 1 (127.0.0.1) has died: its process is gone")
        eventually(lambda: all(process.returncode is not None for process in launcher.processes))
