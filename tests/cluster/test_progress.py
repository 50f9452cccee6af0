"""What is known of replicas' start-up: records in Ray's key-value store, which is a dict here."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster import application_state, ray_compat
from cluster.application_state import ASLEEP, ApplicationState
from cluster.broadcast import Answers
from cluster.exchange import NO_ENGINE
from cluster.progress import ProgressReporter, StartUpError, last_failure
from cluster.roles import Role
from engine.backend import BackendError


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    records: dict[str, bytes] = {}
    monkeypatch.setattr(ray_compat, "kv_put", records.__setitem__)
    monkeypatch.setattr(ray_compat, "kv_get", records.get)
    monkeypatch.setattr(ray_compat, "kv_delete", records.pop)
    monkeypatch.setattr(ray_compat, "kv_keys", lambda prefix: [key for key in records if key.startswith(prefix)])
    return records


def fail(replica: str, reason: str, role: Role | None = Role.UNIFIED, application: str = "app") -> None:
    with pytest.raises(StartUpError), ProgressReporter(application, replica, role).reporting_errors():
        raise BackendError(reason)


def test_the_last_replica_that_takes_requests_counts() -> None:
    assert last_failure("app") is None
    fail("a", "no memory")
    assert last_failure("app") == "no memory"
    fail("p", "no chips", Role.PREFILL)
    fail("x", "another's", application="other")
    assert last_failure("app") == "no memory"
    fail("d", "no chips", Role.DECODE)
    assert last_failure("app") == "decode: no chips"
    fail("i", "no tokenizer", None)  # an ingress
    assert last_failure("app") == "decode: no chips"
    again = ProgressReporter("app", "b", Role.DECODE)
    again("reading weights", 0, 10)
    assert last_failure("app") is None  # it may succeed
    again.failed("no disk")
    assert last_failure("app") == "decode: no disk"


def test_failures_are_over_when_a_replica_has_served_even_when_it_is_gone() -> None:
    fail("a", "no memory")
    served = ProgressReporter("app", "b", Role.UNIFIED)
    served.ready("tiny on mock")
    served.forget()
    assert last_failure("app") is None
    fail("c", "no disk")
    ProgressReporter("app", "p", Role.PREFILL).ready("tiny on mock")
    assert last_failure("app") == "no disk"


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def broadcast(*_: object, **__: object) -> Answers:
        return Answers()

    monkeypatch.setattr(application_state, "broadcast", broadcast)
    return cast("Any", SimpleNamespace(app_name="app"))


@pytest.mark.parametrize("sleeps", [False, True])
async def test_health_without_engines_says_why_if_that_is_known(nobody_answers: Any, sleeps: bool) -> None:
    state = ApplicationState(nobody_answers, nobody_answers, sleeps=sleeps)
    health = await state.health()
    assert (health.healthy, health.reason) == ((True, ASLEEP) if sleeps else (False, NO_ENGINE))
    fail("a", "no memory")
    health = await state.health()
    assert not health.healthy
    assert health.reason == "no engine can start: no memory"


async def test_health_does_not_wait_for_a_control_store_that_is_away(
    nobody_answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(application_state, "CONTROL_STORE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ray_compat, "kv_keys", lambda _: [str(back.wait(10))])
    state = ApplicationState(nobody_answers, nobody_answers)
    before = threading.active_count()
    try:
        for health in await asyncio.gather(*(state.health() for _ in range(20))):
            assert health.reason == NO_ENGINE
        assert threading.active_count() <= before + 1  # one asks for all of them
    finally:
        back.set()
