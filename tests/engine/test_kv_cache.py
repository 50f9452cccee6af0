from __future__ import annotations

import pytest

from engine.kv_cache import BlockPool, block_hashes, root_hash


def chain(*blocks: list[int], salt: str = "") -> list[bytes]:
    hashes = [root_hash(cache_salt=salt)]
    for tokens in blocks:
        hashes += block_hashes(hashes[-1], tokens, len(tokens))
    return hashes[1:]


def cached_chain(pool: BlockPool, length: int) -> tuple[list[int], list[bytes]]:
    """Allocates and registers a chain of blocks."""
    blocks, hashes = pool.allocate(length), chain(*([index] for index in range(length)))
    for block, known_as in zip(blocks, hashes, strict=True):
        pool.register(block, known_as)
    return blocks, hashes


def test_hash_depends_on_everything_before_the_block() -> None:
    assert chain([1, 2], [3, 4])[1] != chain([9, 2], [3, 4])[1]
    assert chain([1, 2])[0] == chain([1, 2], [3, 4])[0]


def test_hash_depends_on_salt_and_adapter() -> None:
    assert chain([1, 2]) != chain([1, 2], salt="tenant")
    assert root_hash(adapter_digest=b"a") != root_hash(adapter_digest=b"b") != root_hash()
    assert root_hash(cache_salt="a", adapter_digest=b"b") != root_hash(cache_salt="ab")


def test_hash_is_the_same_in_every_process() -> None:
    assert chain([1, 2, 3])[0].hex().startswith("adcc4015feeaa398")


def test_freed_blocks_are_found_until_they_are_handed_out_again() -> None:
    pool = BlockPool(4)
    blocks, hashes = cached_chain(pool, 2)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.find(hashes) == blocks
    pool.allocate(4)
    assert pool.find(hashes) == []


def test_blocks_without_content_are_reused_first_then_the_tail_of_the_oldest_chain() -> None:
    pool = BlockPool(5)
    blocks, hashes = cached_chain(pool, 3)
    plain = pool.allocate(1)
    pool.release(blocks)
    pool.release(plain)
    assert set(pool.allocate(2)) == {plain[0], 4}
    assert pool.allocate(1) == [blocks[2]]
    assert pool.find(hashes) == blocks[:2]


def test_a_shared_block_is_free_only_when_its_last_owner_is_gone() -> None:
    pool = BlockPool(2)
    blocks, hashes = cached_chain(pool, 1)
    pool.share(pool.find(hashes))
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_sharing_takes_a_freed_block_back_from_the_free_ones() -> None:
    pool = BlockPool(2)
    blocks, hashes = cached_chain(pool, 1)
    pool.release(blocks)
    assert pool.num_free_without(blocks) == 1
    pool.share(pool.find(hashes))
    assert pool.num_free == pool.num_free_without(blocks) == 1
    assert pool.usage == 0.5
    assert blocks[0] not in pool.allocate(1)


def test_the_first_block_with_a_content_is_the_one_found() -> None:
    pool = BlockPool(3)
    (first,), hashes = cached_chain(pool, 1)
    (second,) = pool.allocate(1)
    pool.register(second, hashes[0])
    assert pool.find(hashes) == [first]
    pool.release([second])
    assert pool.find(hashes) == [first]


def test_a_double_free_is_an_error() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="block 0 freed twice"):
        pool.release(blocks)


def test_asking_for_more_than_is_free_is_an_error_and_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="3 KV blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
