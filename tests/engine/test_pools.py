"""Options of prefill and decode pools: what they make of each other, and which are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.pools import PREFILL_OVERRIDES, Pools, prefill_config


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_args({"backend": "mock", **options})


@pytest.mark.parametrize(("text", "pools"), [("1,2", (1, 2)), (" 3 , 1 ", (3, 1))])
def test_a_topology_is_prefill_and_decode_replicas(text: str, pools: tuple[int, int]) -> None:
    found = Pools.of(config(disagg_topo=text))
    assert (found.prefill, found.decode) == pools
    assert found.replicas == sum(pools)


def test_without_a_topology_all_replicas_take_requests() -> None:
    assert Pools.of(config(data_parallel_size=3)) == Pools(prefill=0, decode=3)
    assert config(disagg_topo="").disagg_topo is None


def test_prefill_replicas_have_the_options_of_decode_replicas_but_for_those_that_are_given() -> None:
    options = config(
        disagg_topo="2,3", block_size=32, num_blocks=50, max_model_len=1024, prefill_block_size="16", prefill_max_seqs=4
    )
    own = prefill_config(options)
    assert (own.block_size, own.max_decode_seqs, own.num_blocks, own.max_model_len) == (16, 4, 50, 1024)
    assert own.exchanges_kv
    assert Pools.of(own) == Pools(prefill=2, decode=3)
    assert (options.block_size, options.max_decode_seqs) == (32, 256)


def test_prefill_replicas_on_one_host_have_no_topology_though_decode_replicas_do() -> None:
    slices = {"backend": "tpu", "num_hosts": 2, "tensor_parallel_size": 8, "topology": "v6e:2x4"}
    options = config(disagg_topo="1,1", prefill_num_hosts=1, prefill_tensor_parallel_size=4, **slices)
    assert options.topology == "v6e:2x4"
    assert prefill_config(options).topology is None
    with pytest.raises(ConfigError, match="topology says where num_hosts > 1 hosts"):
        config(disagg_topo="1,1", prefill_num_hosts=1, prefill_topology="v6e:2x4", **slices)


def test_every_override_is_of_an_option_that_exists() -> None:
    assert {*PREFILL_OVERRIDES, *PREFILL_OVERRIDES.values()} <= set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disagg_topo": "1"}, "give prefill and decode replicas as P,D"),
        ({"disagg_topo": "0,1"}, "give prefill and decode replicas as P,D"),
        ({"disagg_topo": "1,x"}, "give prefill and decode replicas as P,D"),
        ({"disagg_topo": "1,1", "data_parallel_size": 2}, "leave data_parallel_size out"),
        ({"prefill_block_size": 16}, "set disagg_topo, or leave prefill_block_size out"),
        ({"disagg_min_prefill_tokens": 16}, "set disagg_topo, or leave disagg_min_prefill_tokens out"),
        ({"disagg_topo": "1,1", "prefill_num_hosts": 2}, "can't be dealt evenly to num_hosts=2"),
    ],
)
def test_pools_that_can_not_be_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        config(**options)
    assert "\n" not in str(caught.value)
