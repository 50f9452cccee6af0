"""A gang behind Serve: it answers over HTTP as one host does, ends as a whole, and comes up again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.text.tokenizer import load_tokenizer
from tests.backends.jax.engine import engine
from tests.backends.jax.test_tensor_parallel import SMALL
from tests.backends.models import tiny_llama
from tests.cluster.apps import completion, deployed, eventually, replica_processes

DEADLINE_S = 3.0
PROMPT = [5, 17, 200, 42, 9, 77, 123, 8, 64, 31]
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 3},
)


class Workers:
    """The processes of an application's gang."""

    def __init__(self, application: str) -> None:
        self._application = application

    def now(self) -> dict[str, psutil.Process]:
        """Those that are alive, by rank."""
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        found = {}
        for name in names:
            if name.startswith(f"sliceserve:{self._application}:") and ":worker:" in name:
                try:
                    described = ray.get(ray.get_actor(name, namespace="serve").describe.remote(), timeout=5)
                except (ValueError, ray.exceptions.RayError):  # it has just ended
                    continue
                found[name.split(":")[-1]] = psutil.Process(described.pid)
        return found


def answers(url: str) -> bool:
    try:
        return completion(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=20)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def assert_ends_and_comes_back(url: str, workers: Workers, victim: psutil.Process, sent: signal.Signals) -> None:
    before = list(workers.now().values())
    assert len(before) == 2
    started = time.monotonic()
    victim.send_signal(sent)
    eventually(lambda: gone(before), DEADLINE_S + 3)
    assert time.monotonic() - started < DEADLINE_S + 3
    eventually(lambda: health(url).status_code == 503)
    eventually(lambda: answers(url), 90)
    eventually(lambda: health(url).status_code == 200)
    assert not {process.pid for process in before} & {process.pid for process in workers.now().values()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 49152}  # the demo tokenizer's
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", **sizes)


def test_two_hosts_answer_as_one_does_and_end_together(serve_url: str, model: Path) -> None:
    sampling = [SamplingParams(max_tokens=12, ignore_eos=True, **features) for features in FEATURES]
    with engine(model=str(model), tensor_parallel_size=1, **SMALL) as alone:
        expected = [alone.run([PROMPT], each)[0] for each in sampling]
    tokenizer = load_tokenizer(EngineConfig.from_args({}))
    options = {**SMALL, "backend": "cpu", "dtype": "float32", "model": str(model), "tokenizer": "smollm2"}
    sizes = {"num_hosts": 2, "tensor_parallel_size": 4, "served_model_name": "tiny"}
    with deployed(serve_url, "slice", **options, **sizes, step_deadline_s=30) as url:
        for features, reference in zip(FEATURES, expected, strict=True):
            choice = completion(url, prompt=PROMPT, max_tokens=12, **features).json()["choices"][0]
            assert choice["text"] == tokenizer.decode(reference.token_ids)
            if reference.logprobs:
                chosen = [entry.logprob for entry in reference.logprobs]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-4)
        workers = Workers("slice")
        assert sorted(workers.now()) == ["0", "1"]
        processes = list(workers.now().values())
        processes[1].kill()
        eventually(lambda: gone(processes), 3)
        eventually(lambda: health(url).status_code == 503)
        assert int(health(url).headers["retry-after"]) > 0
    eventually(lambda: not workers.now())


@pytest.fixture(scope="module")
def mock_url(serve_url: str) -> Iterator[str]:
    options = {"num_hosts": 2, "tensor_parallel_size": 4, "max_decode_seqs": 8, "step_deadline_s": DEADLINE_S}
    with deployed(serve_url, "gang", **options) as url:
        yield url
    eventually(lambda: not Workers("gang").now())


@pytest.mark.matrix
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gang_ends_with_any_of_its_workers(mock_url: str, rank: str, sent: signal.Signals) -> None:
    eventually(lambda: answers(mock_url), 60)
    workers = Workers("gang")
    assert_ends_and_comes_back(mock_url, workers, workers.now()[rank], sent)


@pytest.mark.matrix
def test_no_worker_outlives_its_leader(mock_url: str) -> None:
    eventually(lambda: answers(mock_url), 60)
    [leader] = replica_processes("gang", "Engine")
    assert_ends_and_comes_back(mock_url, Workers("gang"), leader, signal.SIGKILL)
