"""What replicas and the prefix store tell each other. KV itself travels as objects of Ray's store, beside these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """KV that a replica would like the store to keep: one object with some blocks."""

    space: bytes  # whose KV it is: identity.space_of
    block_hashes: tuple[bytes, ...]  # in the object's order
    parent: bytes | None  # the block before the first one in its prompt, where that is known
    num_bytes: int
    node: str  # Ray's id of the node that has it, which is where it stays


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive blocks of a chain that lie one behind the other in one segment."""

    segment: int
    first: int  # block within the segment
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A state of the store's directory. Another epoch is another store, which knows nothing of the one before."""

    epoch: bytes = b""
    number: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """How the directory of one space came from a version that a replica knew to a later one."""

    version: Version
    whole: bool  # `added` is everything there is; what was known before is void
    used_bytes: int  # of all spaces, where it is this replica's part to report it; else 0
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
