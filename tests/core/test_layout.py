"""Which rank sits where, and blocks of tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import AXES, Layout, Shard

layouts = st.builds(Layout, *(st.integers(1, 3) for _ in AXES))


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    ranks = [layout.rank(layout.coordinates(rank)) for rank in range(layout.world_size)]
    assert ranks == list(range(layout.world_size))


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks(layout: Layout, axes: set) -> None:
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == layout.size(*axes) and list(group) == sorted(group)
        assert all(layout.members(rank, axes) == group for rank in group)
        assert [layout.index(rank, axes) for rank in group] == list(range(len(group)))


def test_tensor_ranks_are_neighbours_and_stages_far_apart() -> None:
    layout = Layout(pipeline=2, replicate=2, tensor=2)
    assert layout.members(0, ["tensor"]) == (0, 1)
    assert layout.members(0, ["replicate"]) == (0, 2)
    assert layout.members(0, ["pipeline"]) == (0, 4)
    assert layout.groups(["pipeline", "tensor"]) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert str(layout) == "pp2·dp2·tp2" and str(Layout()) == "1"


def test_impossible_sizes_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor = 0"):
        Layout(tensor=0)
    with pytest.raises(ValueError, match="rank = 2"):
        Layout(tensor=2).coordinates(2)


def test_a_block_of_a_block() -> None:
    mine = Shard((8, 3), (4, 0), (4, 3), ("tensor",)).rows(1, 2, ("shard",))
    assert (mine.offsets, mine.sizes, mine.axes) == ((5, 0), (2, 3), ("tensor", "shard"))
    assert not mine.is_whole and mine.numel == 6 and Shard.whole((2,)).is_whole
    with pytest.raises(ValueError, match="not inside"):
        Shard((4,), (3,), (2,))
