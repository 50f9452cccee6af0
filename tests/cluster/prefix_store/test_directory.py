"""The store's directory: what is found, what is given up, and what followers are told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.prefix_store.directory import Directory
from cluster.prefix_store.history import History
from cluster.prefix_store.messages import Offer, Run, Version

SPACE, OTHER_SPACE = b"model", b"other model"
KIB = 1024


def block(number: int) -> bytes:
    return number.to_bytes(4, "big")


def offer(*numbers: int, parent: int | None = None, node: str = "a", space: bytes = SPACE, size: int = KIB) -> Offer:
    return Offer(
        space=space,
        block_hashes=tuple(map(block, numbers)),
        parent=None if parent is None else block(parent),
        num_bytes=size * len(numbers),
        node=node,
    )


def directory(limit: int = 1 << 20) -> Directory[str]:
    made: Directory[str] = Directory(b"epoch")
    made.limit("a", limit)
    return made


def room_for(*offers: Offer) -> int:
    """A limit that just these fit."""
    probe = directory()
    for item in offers:
        assert probe.add(item, "")
    return probe.used_bytes


def chain(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]


def test_the_longest_beginning_of_a_chain_is_found_in_as_few_runs_as_it_lies_in() -> None:
    store = directory()
    store.add(offer(1, 2, 3), "first")
    store.add(offer(4, 5, parent=3), "second")
    assert store.find(SPACE, chain(1, 2, 3, 4, 9, 5)) == [
        Run(segment=0, first=0, count=3),
        Run(segment=1, first=0, count=1),
    ]
    assert store.find(SPACE, chain(2, 3)) == [Run(segment=0, first=1, count=2)]
    assert store.find(SPACE, chain(9, 1, 2)) == []
    assert [store.content(segment) for segment in (0, 1)] == ["first", "second"]


def test_another_models_blocks_are_never_found() -> None:
    store = directory()
    store.add(offer(1, 2), "")
    store.add(offer(2, 3, space=OTHER_SPACE), "")
    assert store.find(OTHER_SPACE, chain(1, 2)) == []
    assert store.find(SPACE, chain(1, 2, 3)) == [Run(segment=0, first=0, count=2)]
    assert store.changes(OTHER_SPACE, Version()).added == tuple(chain(2, 3))


def test_what_is_here_is_not_wanted_again_and_the_first_copy_stays() -> None:
    store = directory()
    assert store.add(offer(1, 2), "")
    assert not store.wants(offer(2, 1))
    assert store.add(offer(2, 3), "")
    assert store.find(SPACE, chain(1, 2)) == [Run(segment=0, first=0, count=2)]
    store.drop(0)
    assert store.find(SPACE, chain(2, 3)) == []  # its only place was the first segment
    assert store.find(SPACE, chain(3)) == [Run(segment=1, first=1, count=1)]


def test_a_chain_is_given_up_from_its_tail() -> None:
    head, middle, tail = offer(1, 2), offer(3, 4, parent=2), offer(5, 6, parent=4)
    store = directory(room_for(head, middle, tail))
    for item in (head, middle, tail):
        store.add(item, "")
    store.add(offer(7, 8), "")
    assert [run.count for run in store.find(SPACE, chain(1, 2, 3, 4, 5, 6))] == [2, 2]
    store.add(offer(9, 10), "")  # now the one that was not asked for is the oldest
    assert store.find(SPACE, chain(7, 8)) == []
    assert len(store.find(SPACE, chain(1, 2, 3, 4))) == 2


def test_using_a_chains_end_keeps_its_beginning() -> None:
    head, tail = offer(1, 2), offer(3, 4, parent=2)
    store = directory(room_for(head, tail, offer(5, 6)))
    store.add(head, "")
    store.add(tail, "")
    store.add(offer(5, 6), "")
    assert store.find(SPACE, chain(3, 4))  # a replica that has the head itself
    store.add(offer(7, 8), "")
    assert store.find(SPACE, chain(5, 6)) == []
    assert len(store.find(SPACE, chain(1, 2, 3, 4))) == 2


def test_each_node_has_its_own_limit() -> None:
    store = directory(room_for(offer(1)))
    assert not store.wants(offer(1, 2))
    assert not store.wants(offer(1, node="b"))  # nobody there has said how much
    store.limit("b", 1 << 20)
    assert store.add(offer(1, 2, node="b"), "")
    assert store.add(offer(3), "")
    assert store.add(offer(4), "")  # in the place of 3, and not of what another node holds
    assert store.find(SPACE, chain(1, 2))
    assert not store.find(SPACE, chain(3))
    store.limit("b", 0)
    assert not store.find(SPACE, chain(1, 2))


def test_a_follower_that_applies_all_changes_knows_what_the_directory_holds() -> None:
    store = directory(room_for(offer(1, 2), offer(3, 4)))
    first = store.changes(SPACE, Version())
    assert first.whole
    store.add(offer(1, 2), "")
    store.add(offer(3, 4), "")
    store.add(offer(5, 6), "")
    changes = store.changes(SPACE, first.version)
    assert not changes.whole
    assert (set(changes.added), set(changes.removed)) == (set(chain(3, 4, 5, 6)), set(chain(1, 2)))
    assert store.changes(SPACE, changes.version).added == ()
    restarted = store.changes(SPACE, Version(epoch=b"another", number=changes.version.number))
    assert restarted.whole
    assert set(restarted.added) == set(chain(3, 4, 5, 6))


def test_changes_of_too_long_ago_are_not_told() -> None:
    history = History(kept=2)
    for number in range(3):
        history.added(block(number))
    assert history.since(0) is None
    assert history.since(1) == (tuple(chain(2, 1)), ())
    assert history.since(3) == ((), ())
    assert history.since(4) is None


Operation = tuple[str, int, int, int]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "find", "drop", "limit"]), st.integers(0, 30), st.integers(1, 6), st.integers(0, 1)
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_whatever_happens_memory_is_bounded_and_what_is_said_to_be_here_is(operations: list[Operation]) -> None:
    store = directory(40 * KIB)
    limits = {"a": 40 * KIB, "b": 20 * KIB}
    store.limit("b", limits["b"])
    contents: dict[str, tuple[bytes, ...]] = {}
    known: set[bytes] = set()
    version = Version()
    for kind, number, count, on in operations:
        node, numbers = "ab"[on], range(number, number + count)
        if kind == "add":
            name = str(len(contents))
            contents[name] = offer(*numbers).block_hashes
            store.add(offer(*numbers, parent=number - 1 if number else None, node=node, size=2 * KIB), name)
        elif kind == "find":
            runs = store.find(SPACE, chain(*numbers))
            found = [h for r in runs for h in contents[store.content(r.segment)][r.first : r.first + r.count]]
            assert found == chain(*numbers)[: len(found)]
        elif kind == "drop":
            store.drop(number)
        else:
            limits[node] = number * KIB
            store.limit(node, limits[node])
        changes = store.changes(SPACE, version)
        known = (set() if changes.whole else known - set(changes.removed)) | set(changes.added)
        version = changes.version
        assert store.used_bytes <= sum(limits.values())
        assert store.num_blocks == len(known)
        assert all(store.find(SPACE, [one]) for one in known)


@pytest.mark.parametrize("count", [1, 50])
def test_tiny_blocks_count_with_what_the_directory_needs_for_them(count: int) -> None:
    store = directory(64 * KIB)
    for start in range(0, 10_000, count):
        store.add(offer(*range(start, start + count), size=1), "")
    assert store.num_blocks <= 64 * KIB / 256
