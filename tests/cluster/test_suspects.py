"""Suspects: who failed is taken last, until it can be trusted again."""

from __future__ import annotations

import pytest

from cluster import suspects
from cluster.suspects import Suspects


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(suspects.time, "monotonic", lambda: now[0])
    return now


def test_one_with_a_line_is_forgiven_after_a_while_and_one_without_when_it_has_one(clock: list[float]) -> None:
    lines = {"a"}
    made = Suspects(lines.__contains__)
    made.add("a")
    made.add("b")
    assert set(made) == {"a", "b"}
    clock[0] = suspects.SUSPICION_S + 1
    assert set(made) == {"b"}
    lines.add("b")
    assert len(made) == 0


def test_one_that_takes_a_request_is_none(clock: list[float]) -> None:
    made = Suspects({"a"}.__contains__)
    made.add("a")
    made.clear("a")
    assert "a" not in made
    clock[0] = 1.0


def test_those_that_never_come_back_are_forgotten(clock: list[float]) -> None:
    made = Suspects(lambda _: False)
    for number in range(100):
        made.add(str(number))
        clock[0] += suspects.MEMORY_S / 10
    assert len(made) == 10


def test_one_that_is_cleared_while_another_thread_asks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Suspects({"a"}.__contains__)
    made.add("a")

    def now() -> float:
        made.clear("a")  # at the worst moment of the question
        return 0.0

    monkeypatch.setattr(suspects.time, "monotonic", now)
    assert "a" in made
    assert "a" not in made
