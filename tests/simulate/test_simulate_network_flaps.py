"""Links that go down for a moment, and timers that decide how long a connection stands still, or that it ends."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.simulate.network_settings import Retransmit, shortest_timeout


def test_the_timer_is_that_of_the_specification() -> None:
    assert Retransmit(14).timer_s == pytest.approx(0.0671, abs=1e-4)  # 4.096 µs · 2^14
    assert Retransmit(20).timer_s == pytest.approx(4.295, abs=1e-3)
    assert Retransmit(20, 7).patience_s == pytest.approx(30.06, abs=0.01)


def test_a_flap_of_seconds_ends_jobs_with_the_timeout_of_old_but_not_with_a_larger_one() -> None:
    """MegaScale 6.3: set it explicitly larger; with the default it fails before the NIC is back."""
    assert Retransmit(14).stall_s(3.0) == math.inf
    assert Retransmit(18).stall_s(3.0) == pytest.approx(3 * 4.096e-6 * 2**18)
    assert Retransmit(20).stall_s(3.0) == pytest.approx(4.295, abs=1e-3)
    assert shortest_timeout(3.0, 7) == 17


def test_adaptive_retransmission_comes_back_sooner_from_short_flaps() -> None:
    fixed, adaptive = Retransmit(20), Retransmit(20, adaptive=True)
    for flap_s in (0.05, 0.5, 1.0, 3.0):
        assert adaptive.stall_s(flap_s) < fixed.stall_s(flap_s)
    assert adaptive.tries_s()[:4] == pytest.approx([0.1, 0.3, 0.7, 1.5])


timers = st.builds(
    Retransmit,
    timeout_exponent=st.integers(1, 24),
    retries=st.integers(1, 7),
    adaptive=st.booleans(),
    adaptive_first_s=st.floats(1e-4, 10),
)


@given(timers, st.floats(1e-9, 100))
def test_a_stall_outlasts_its_flap_and_ends_within_the_retries(timer: Retransmit, flap_s: float) -> None:
    stall_s = timer.stall_s(flap_s)
    if flap_s > timer.patience_s:
        assert stall_s == math.inf
    else:
        assert flap_s <= stall_s <= timer.patience_s * (1 + 1e-12)
        if not timer.adaptive:
            assert stall_s == pytest.approx(max(1, math.ceil(flap_s / timer.timer_s - 1e-9)) * timer.timer_s)
        else:  # no wait is longer than the flap so far, or the first timer
            assert stall_s <= 2 * flap_s + 2 * timer.adaptive_first_s


@given(timers)
def test_tries_come_in_order_and_no_further_apart_than_the_timer(timer: Retransmit) -> None:
    tries = [0.0, *timer.tries_s()]
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert all(0 <= gap <= timer.timer_s * (1 + 1e-9) for gap in gaps)
    assert tries[-1] == pytest.approx(timer.patience_s)


@given(st.floats(1e-3, 1000), st.integers(1, 7))
def test_the_shortest_timeout_is_enough_and_one_less_is_not(flap_s: float, retries: int) -> None:
    exponent = shortest_timeout(flap_s, retries)
    assert exponent is not None
    assert Retransmit(exponent, retries).stall_s(flap_s) < math.inf
    assert Retransmit(exponent - 1, retries).stall_s(flap_s) == math.inf


def test_no_timeout_outlasts_a_day() -> None:
    assert shortest_timeout(86_400, 7) is None


def test_no_flap_is_no_stall() -> None:
    assert Retransmit().stall_s(0.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"timeout_exponent": 32}, "timeout_exponent"),
        ({"timeout_exponent": 0}, "timeout_exponent"),
        ({"retries": 8}, "retries"),
        ({"adaptive_first_s": 0.0}, "adaptive_first_s"),
    ],
)
def test_what_adapters_do_not_take_is_refused(changes: dict[str, float], field: str) -> None:
    with pytest.raises(UserError) as caught:
        Retransmit(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("flap_s", [-1.0, float("nan"), float("inf")])
def test_a_flap_is_a_time(flap_s: float) -> None:
    with pytest.raises(UserError):
        Retransmit().stall_s(flap_s)
