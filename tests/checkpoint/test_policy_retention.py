"""Which checkpoints are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.storage.retention import Stocked, unkept


def stock(*steps: int, **losses: float) -> list[Stocked]:
    """Newest first, 10 bytes each; ``s3=1.5`` is the loss at step 3."""
    return [
        Stocked(f"s{s}", s, True, 10, (("validation_loss", losses[f"s{s}"]),) if f"s{s}" in losses else ())
        for s in sorted(steps, reverse=True)
    ]


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({"keep_last": 2}, [1, 2, 3, 4]),
        ({"keep_last": 1, "keep_every": 3}, [1, 2, 4, 5]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 5]),
        ({"keep_last": 1, "keep_best": 9}, [5]),
        ({"keep_last": 1, "keep_best": 2, "best_metric": "other"}, [1, 2, 3, 4, 5]),
        ({"keep_last": 6, "budget_bytes": 25}, [1, 2, 3, 4]),
        ({"keep_last": 6, "budget_bytes": 60}, []),
        ({"keep_last": 6, "budget_bytes": 1}, [1, 2, 3, 4, 5]),
        ({"keep_last": 2, "keep_every": 2, "keep_best": 1, "budget_bytes": 30}, [1, 2, 3]),
        ({"keep_last": 2, "keep_every": 2, "keep_best": 1, "budget_bytes": 20}, [1, 2, 3, 4]),
    ],
)
def test_which_go(settings: dict, gone: list[int]) -> None:
    found = stock(1, 2, 3, 4, 5, 6, s1=2.0, s2=9.0, s3=1.0, s4=3.0, s5=math.nan)
    assert [one.step for one in unkept(found, "s6", CheckpointConfig(**settings))] == gone


def test_the_best_of_equals_is_the_newest() -> None:
    found = stock(1, 2, 3, s1=1.0, s2=1.0)
    assert [one.step for one in unkept(found, "s3", CheckpointConfig(keep_last=1, keep_best=1))] == [1]


def test_those_spared_stay_and_count() -> None:
    config = CheckpointConfig(keep_last=3, budget_bytes=20)
    assert [one.step for one in unkept(stock(1, 2, 3), "s3", config, spared=["s1"])] == [2]


def test_newer_than_the_good_one_stay_even_if_damaged() -> None:
    found = [Stocked("s9", 9, is_sound=False, size_bytes=100), *stock(7, 8)]
    assert unkept(found, "s8", CheckpointConfig(keep_last=2)) == []
    assert [one.step for one in unkept(found, "s8", CheckpointConfig(keep_last=2, budget_bytes=50))] == [7]


@given(
    st.sets(st.integers(0, 40), min_size=1, max_size=12),
    st.sets(st.integers(0, 40)),
    st.integers(1, 5),
    st.integers(0, 7),
    st.integers(0, 4),
    st.integers(0, 150),
    st.data(),
)
def test_always(
    steps: set[int], broken: set[int], last: int, every: int, best: int, budget: int, data: st.DataObject
) -> None:
    losses = {f"s{s}": data.draw(st.sampled_from([1.0, 2.0, 3.0, math.inf])) for s in steps}
    sound = steps - broken
    if not sound:
        return
    found = [Stocked(o.name, o.step, o.step in sound, 10, o.metrics) for o in stock(*steps, **losses)]
    good = data.draw(st.sampled_from(sorted(sound)))
    settings = {"keep_last": last, "keep_every": every, "keep_best": best}
    roomy = {one.step for one in unkept(found, f"s{good}", CheckpointConfig(**settings))}
    gone = {one.step for one in unkept(found, f"s{good}", CheckpointConfig(**settings, budget_bytes=budget))}
    assert roomy <= gone
    assert all(step < good for step in gone)
    left = steps - gone
    may_go = left - {step for step in steps if step >= good}
    assert not budget or 10 * len(left) <= budget or not may_go
    if gone - roomy and may_go & set(sorted((s for s in sound if s <= good), reverse=True)[:last]):
        recent = sorted((s for s in sound if s <= good), reverse=True)[:last]
        assert min(may_go & set(recent)) > max((gone - roomy) & set(recent), default=-1), "the oldest go first"
