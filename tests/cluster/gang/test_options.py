"""What can be asked of a gang, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.app import build_app
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
