"""No option is accepted and ignored: one that needs another is refused without it."""

from __future__ import annotations

import pytest

from engine.config import ConfigError, EngineConfig
from engine.option_rules import NEEDS

OTHER_VALUES: dict[str, object] = {
    "prefill_topology": "v6e:4x4",
    "kv_transfer_checksums": True,
    "prefill_block_size": 16,
}


def another_value(name: str) -> object:
    default = EngineConfig.model_fields[name].default
    return OTHER_VALUES.get(name, 16 if default is None else default * 2)


@pytest.mark.parametrize("name", NEEDS)
def test_an_option_that_needs_another_is_refused_without_it(name: str) -> None:
    value = another_value(name)
    with pytest.raises(ConfigError, match=f"{name}=.* needs {NEEDS[name][0]}; set .* or leave {name} out"):
        EngineConfig.from_args({name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mock_step_ms": 3, "backend": "cpu"}, "mock_step_ms=3.0 needs backend=mock"),
        ({"wake_timeout_s": 3}, "wake_timeout_s=3 needs min_replicas=0"),
        ({"wake_timeout_s": 3, "max_replicas": 2, "min_replicas": 1}, "wake_timeout_s=3 needs min_replicas=0"),
        ({"backend": "neuron"}, "backend=neuron is not available yet"),
        ({"max_lora_rank": 8}, "max_lora_rank=8 is not available yet"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_args(options)
    assert "\n" not in str(caught.value)


def test_an_option_may_be_given_with_its_default() -> None:
    EngineConfig.from_args({"downscale_delay_s": "300", "kv_transfer_timeout_s": "10"})


NUMBERS = [
    name
    for name, field in EngineConfig.model_fields.items()
    if any(kind in str(field.annotation) for kind in ("int", "float")) and "Literal" not in str(field.annotation)
]


@pytest.mark.parametrize("value", ["99999999999999999999", 10**20])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_as_large_as_one_likes(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig.from_args({name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("topology", ["99999999999,1", "1,99999999999"])
def test_no_pool_has_as_many_replicas_as_one_likes(topology: str) -> None:
    with pytest.raises(ConfigError, match="disagg_topo"):
        EngineConfig.from_args({"disagg_topo": topology})
