"""Options of the prefix store, and which connector they give a replica."""

from __future__ import annotations

import pytest

from backends.mock import MockBackend
from cluster.connectors import create_connector
from cluster.metrics_text import ReplicaLabels
from cluster.prefix_store.connector import PrefixStoreConnector
from engine.config import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": "disk"}, "kv_store"),
        ({"kv_store": "object_store", "enable_prefix_cache_hbm": "false"}, "needs enable_prefix_cache_hbm=true"),
        ({"kv_store_gib": "4"}, "set kv_store, or leave kv_store_gib out"),
        ({"kv_store": "object_store", "kv_store_gib": "0"}, "kv_store_gib"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_args(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv_store", [None, "object_store"])
def test_a_replica_has_the_store_if_it_is_asked_for(kv_store: str | None) -> None:
    config = EngineConfig.from_args({"backend": "mock", "kv_store": kv_store})
    labels = ReplicaLabels(model_name="m", application="a", replica="r", role="unified")
    connector = create_connector(config, labels, backend=MockBackend(config))
    assert isinstance(connector, PrefixStoreConnector) == (kv_store is not None)
