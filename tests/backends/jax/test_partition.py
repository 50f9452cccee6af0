"""How heads and tensors are cut over chips: every part is somewhere, once where it counts once, and zeros beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.jax.heads import HeadLayout
from backends.jax.partition import Partition
from tests.backends.jax.configs import LLAMA_8B

layouts = st.builds(
    lambda kv_heads, group, chips: HeadLayout(num_heads=kv_heads * group, num_kv_heads=kv_heads, chips=chips),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 32),
).filter(lambda layout: layout.chips <= layout.num_heads)


@given(layouts)
def test_every_query_head_is_on_one_chip_together_with_its_kv_head(layout: HeadLayout) -> None:
    on_chips = [head for chip in range(layout.chips) for head in layout.heads(chip)]
    assert sorted(on_chips) == list(range(layout.num_heads))
    assert {head for chip in range(layout.chips) for head in layout.kv_heads(chip)} == set(range(layout.num_kv_heads))
    local_group = layout.heads_per_chip // layout.kv_heads_per_chip
    for chip in range(layout.chips):
        heads, kv_heads = layout.heads(chip), layout.kv_heads(chip)
        assert len(heads) <= layout.heads_per_chip
        assert len(kv_heads) <= layout.kv_heads_per_chip
        for local, head in enumerate(heads):
            assert kv_heads[local // local_group] == head // layout.group


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chips", "per_chip"),
    [
        (64, 8, 16, (4, 1)),
        (32, 8, 4, (8, 2)),
        (9, 3, 2, (6, 2)),
        (9, 3, 4, (3, 1)),
        (9, 3, 8, (2, 1)),
        (8, 1, 8, (1, 1)),
    ],
)
def test_known_sizes(heads: int, kv_heads: int, chips: int, per_chip: tuple[int, int]) -> None:
    layout = HeadLayout(num_heads=heads, num_kv_heads=kv_heads, chips=chips)
    assert (layout.heads_per_chip, layout.kv_heads_per_chip) == per_chip


@given(st.integers(2, 2000), st.integers(1, 16), st.sampled_from([1, 128]))
def test_parts_of_a_vocabulary_put_together_are_the_vocabulary(vocab: int, chips: int, lanes: int) -> None:
    partition = Partition(model=replace(LLAMA_8B, vocab_size=vocab), chips=chips, lanes=lanes)
    table = np.arange(1, vocab + 1)
    parts = [partition.cut(table, ("vocab",), chip) for chip in range(chips)]
    assert {len(part) for part in parts} == {partition.vocab_per_chip}
    whole = np.concatenate(parts)
    assert (whole[:vocab] == table).all()
    assert not whole[vocab:].any()


def test_tpu_lanes_are_filled_where_that_is_cheap() -> None:
    sizes = {chips: Partition(model=LLAMA_8B, chips=chips, lanes=128) for chips in (1, 4, 16)}
    assert [sizes[chips].mlp_per_chip for chips in sizes] == [14336, 3584, 896]
    assert [sizes[chips].vocab_per_chip for chips in sizes] == [128256, 32128, 8064]
    tiny = Partition(model=replace(LLAMA_8B, intermediate_size=1000), chips=4, lanes=128)
    assert tiny.mlp_per_chip == 250
