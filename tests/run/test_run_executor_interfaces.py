"""What interfaces have carried in all, out of counters that appear, go, wrap and begin anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.executor.host_sensors import InterfaceBytes, grown
from phalanx.run.messages import Interface


def test_what_is_sent_and_received_adds_up_from_the_first_reading_on() -> None:
    carried = InterfaceBytes()
    assert carried.add([Interface("ib0", 100, 10)]) == 0
    assert carried.add([Interface("ib0", 150, 11)]) == 51
    assert carried.add([Interface("ib0", 150, 11)]) == 51


def test_a_host_without_such_interfaces_says_so() -> None:
    assert InterfaceBytes().add([]) == -1


def test_an_interface_that_appears_counts_from_then_on() -> None:
    carried = InterfaceBytes()
    carried.add([Interface("ib0", 0, 0)])
    assert carried.add([Interface("ib0", 5, 0), Interface("ib1", 10**15, 0)]) == 5
    assert carried.add([Interface("ib1", 10**15 + 7, 0)]) == 12


def test_an_interface_that_was_gone_for_a_while_goes_on_where_it_was() -> None:
    carried = InterfaceBytes()
    carried.add([Interface("ib0", 10**15, 0)])
    assert carried.add([Interface("ib0", 0, 0, is_up=False)]) == 0
    assert carried.add([Interface("ib0", 10**15 + 7, 0)]) == 7


@given(st.lists(st.lists(st.builds(Interface, st.sampled_from(["x", "y"]), st.integers(), st.integers()), max_size=3)))
def test_it_never_shrinks(readings: list[list[Interface]]) -> None:
    carried = InterfaceBytes()
    said = [carried.add(one) for one in readings]
    known = [one for one in said if one >= 0]
    assert known == sorted(known)


@pytest.mark.parametrize(
    ("before", "now", "growth"),
    [
        (5, 9, 4),
        (5, 5, 0),
        ((1 << 32) - 10, 20, 30),
        ((1 << 32) - 10, (1 << 32) - 20, (1 << 32) - 20),
        (1 << 40, 100, 100),
        (3_000_000_000, 0, 1_294_967_296),
        (1_000, 0, 0),
    ],
)
def test_counters_that_wrap_or_begin_anew(before: int, now: int, growth: int) -> None:
    assert grown(before, now) == growth


@given(st.integers(), st.integers())
def test_growth_is_never_negative(before: int, now: int) -> None:
    assert grown(before, now) >= 0
