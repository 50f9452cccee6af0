from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cli.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake
