"""What can be asked of a gang, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.app import build_app
from cluster.gang.placement import platform
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_hosts": 2}, "tensor_parallel_size=1 can't be dealt evenly to num_hosts=2"),
        ({"num_hosts": 3, "tensor_parallel_size": 4}, "use a multiple"),
        ({"topology": "v6e:4x4"}, "topology says where num_hosts > 1 hosts"),
        ({"num_hosts": 2, "tensor_parallel_size": 2, "backend": "cpu", "topology": "v6e:4x4"}, "leave it out"),
    ],
)
def test_impossible_gangs_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig.from_args(options)


def test_gangs_on_tpus_are_built_without_a_tpu_here_and_may_have_any_size() -> None:
    options = {"backend": "tpu", "num_hosts": 4, "tensor_parallel_size": 16, "data_parallel_size": 2}
    assert build_app(options) is not None


def test_named_hosts_decide_what_a_gang_runs_on() -> None:
    sizes = {"num_hosts": 4, "tensor_parallel_size": 16}
    assert platform(EngineConfig.from_args({**sizes, "topology": "v6e:4x4"})) == "tpu"  # it may have to be started
    with pytest.raises(BackendError, match=r"trn1.32xlarge: the Neuron backend is not available yet"):
        platform(EngineConfig.from_args({**sizes, "topology": "trn1.32xlarge"}))
    with pytest.raises(BackendError, match=r"topology=v9:1x1: no topology 'v9:1x1'"):
        platform(EngineConfig.from_args({**sizes, "topology": "v9:1x1"}))
