"""docs/reliability.md states the limits that the code has, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster import app, continuation, frames
from cluster.ingress import sse
from engine.config import EngineConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
SILENCE_S = frames.MISSED_SIGNS * frames.SIGN_OF_LIFE_S


@pytest.mark.parametrize(
    "statement",
    [
        f"`resume_timeout_s`, default {EngineConfig().resume_timeout_s:g} s",
        f"engines lost without a token in between | {continuation.DEATHS_AT_ONE_TOKEN} |",
        f"engines lost in all | {continuation.MAX_DEATHS} |",
        f"{continuation.FIRST_BACKOFF_S:g} s, doubling up to {continuation.MAX_BACKOFF_S:g} s",
        f"tried for {continuation.ADMISSION_TIMEOUT_S:g} s in all",
        f"at one replica for {continuation.ATTEMPT_TIMEOUT_S:g} s at most",
        f"(`{sse.KEEP_ALIVE.decode().strip()}`) every {sse.KEEP_ALIVE_S:g} s",
        f"no sign of life on the line for {SILENCE_S:g} to {SILENCE_S + frames.SIGN_OF_LIFE_S:g} s",
        f"three health checks of {app.HEALTH_CHECK_TIMEOUT_S:g} s",
        f"`step_deadline_s` ({EngineConfig().step_deadline_s:g} s)",
        f"lets it finish for {app.DRAIN_TIMEOUT_S:g} s",
    ],
)
def test_a_limit_is_what_the_code_has(statement: str) -> None:
    assert statement in TEXT


def test_the_tests_that_measured_the_times_are_there() -> None:
    named = re.findall(r"`(test_\w+\.py)(?: -k (\w+))?`", PAGE)
    assert named
    for file, word in named:
        assert word in (ROOT / "tests" / "chaos" / file).read_text(encoding="utf-8"), (file, word)
