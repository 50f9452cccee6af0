"""KV as objects of Ray's store: what its errors mean, and that what arrives is what was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, OwnerDiedError, RayTaskError

from cluster.gang import ray_kv
from cluster.gang.kv import GivenKV
from cluster.gang.ray_kv import GivenPayload
from cluster.kv_objects import kv_error
from cluster.kv_transfer.messages import NoChunk
from engine.kv_blocks import KVLateError, KVLostError
from tests.cluster.kv_transfer.kv import blocks

LOST = KVLostError("the host has dropped it")
REF = "ab" * 28


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GetTimeoutError("too slow"), KVLateError),
        (ObjectLostError(REF, None, ""), KVLostError),
        (OwnerDiedError(REF, None, ""), KVLostError),
        (ActorDiedError(), KVLostError),
        (RayTaskError("give", "Traceback …\n  …", LOST).as_instanceof_cause(), KVLostError),
        (RayTaskError("receive", "Traceback …", KVLateError("x")).as_instanceof_cause(), KVLateError),
        (LOST, KVLostError),
    ],
)
def test_errors_say_in_one_line_whether_kv_is_lost_or_late(error: Exception, kind: type[KVLostError]) -> None:
    found = kv_error(error)
    assert type(found) is kind
    assert found is not LOST  # an error that is raised twice holds what both ways had
    assert str(found)
    assert "\n" not in str(found)
    assert "Traceback" not in str(found)


def test_what_a_host_gives_is_what_was_sent_or_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    given = GivenKV.of(tuple(blocks(0, 8)), with_checksum=True)
    answers: list[Any] = [given, replace(given, checksum=1), replace(given, checksum=None), NoChunk(failure="closed")]
    monkeypatch.setattr(ray_kv, "fetched", lambda *_: answers.pop(0))
    payload = GivenPayload(object())  # type: ignore[arg-type]
    assert payload.fetch(1) == given.shares
    with pytest.raises(KVLostError, match="wrong checksum"):
        payload.fetch(1)
    assert payload.fetch(1) == given.shares
    with pytest.raises(KVLostError, match="does not keep this KV"):
        payload.fetch(1)
