"""Stop strings in a stream are found as in the whole text, and nothing of them leaves early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop import StopStrings

ALPHABET = st.text("ab", max_size=30)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest prefix of the text that ends in a stop string, and the longest such stop string."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), pushes=st.lists(ALPHABET), include=st.booleans()
)
@settings(max_examples=400, deadline=None)
def test_any_stops_in_any_stream_are_found_as_by_naive_search(
    stops: list[str], pushes: list[str], include: bool
) -> None:
    watcher = StopStrings(stops, include=include)
    sent = "".join(watcher.push(text) for text in pushes)
    sent += watcher.finish()
    assert (sent, watcher.hit) == naive("".join(pushes), stops, include)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=ALPHABET)
@settings(max_examples=200, deadline=None)
def test_no_more_is_held_back_than_could_begin_a_stop_string(stops: list[str], text: str) -> None:
    watcher = StopStrings(stops)
    sent = "".join(watcher.push(character) for character in text)
    if not watcher.stopped:
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_leaves_as_soon_as_it_can_not_be_a_stop_string() -> None:
    watcher = StopStrings(["\nUser:", "###"])
    assert watcher.push("Hello\nUs") == "Hello"
    assert watcher.push("ual") == "\nUsual"
    assert watcher.push(" ##") == " "
    assert watcher.push("# more") == ""
    assert watcher.stopped
    assert watcher.hit == "###"
    assert watcher.push("more") == watcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_hostile_stop_strings_take_linear_time() -> None:
    watcher = StopStrings(["a" * 100_000 + "b"])
    assert "".join(watcher.push("a" * 4) for _ in range(25_000)) == ""
    assert watcher.finish() == "a" * 100_000
