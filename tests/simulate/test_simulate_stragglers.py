"""Slow hosts, found and not, against draws and against what MegaScale saw."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.plan.overheads import Spread
from phalanx.simulate.failure_model import (
    DAY_S,
    Checkpoints,
    Duration,
    FailureClass,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
)
from phalanx.simulate.failure_simulation import simulate
from phalanx.simulate.straggler_report import StragglerScenario, lines_of, waits_by_size

MEGASCALE = Spread(slow_share=0.005, slow_excess=0.1)


def test_one_slow_host_holds_up_all() -> None:
    rows = waits_by_size(StragglerScenario(MEGASCALE, 8 * 4**5))
    for row in rows:
        assert row.unfound == pytest.approx(0.1 * (1 - 0.995**row.hosts))
        assert row.alike == 0
    assert [row.hosts for row in rows] == [1, 4, 16, 64, 256, 1024]


def test_what_megascale_gained_is_what_jobs_of_some_hundred_gpus_lose() -> None:
    """0.7 points of about 55 are 1.3 %; of 32 hosts, one in seven jobs has a slow one."""
    own = waits_by_size(StragglerScenario(MEGASCALE, 256))[-1]
    assert own.gained == pytest.approx(0.7 / 55, abs=0.003)


def test_what_finding_them_costs_is_no_gain() -> None:
    """Restarts of an hour for hosts that come often and hold nobody up much."""
    scenario = StragglerScenario(replace(MEGASCALE, slow_excess=0.01), 8192, restart_s=3600.0, slow_per_host_day=0.05)
    rows = waits_by_size(scenario)
    assert rows[-1].gained < 0
    told = " ".join(lines_of(scenario, rows))
    assert "finding them costs" in told and "gained" not in told and "-" not in told.split("costs")[1].split("%")[0]


def test_runs_on_other_hosts_differ_by_whether_one_of_them_is_slow() -> None:
    """MegaScale, section 5: runs of the same job differed in MFU. A run on few hosts has a slow one, or none."""
    for row in waits_by_size(StragglerScenario(MEGASCALE, 8 * 4**5)):
        some = 1 - 0.995**row.hosts
        assert row.unfound_run_sigma == pytest.approx(0.1 * np.sqrt(some * (1 - some)))
        assert row.unfound_step_sigma == 0


def test_runs_of_unequal_ranks_differ_as_draws_do() -> None:
    random = np.random.default_rng(3)
    ranks = random.lognormal(-(0.02**2) / 2, 0.02, (4000, 16 * 8))
    slow = 1 + 0.1 * (random.random((4000, 16)) < 0.02)
    longest = (ranks.reshape(4000, 16, 8) * slow[:, :, None]).max(axis=(1, 2))
    own = waits_by_size(StragglerScenario(Spread(lasting_sigma=0.02, slow_share=0.02, slow_excess=0.1), 16 * 8))[-1]
    assert own.unfound == pytest.approx(longest.mean() - 1, rel=0.03)
    assert own.unfound_run_sigma == pytest.approx(longest.std(), rel=0.05)


def test_found_hosts_take_the_time_until_they_are_found_and_restarts() -> None:
    """The same as months that are played with slow hosts only."""
    question = StragglerScenario(
        Spread(slow_excess=0.5, slow_share=0.5),
        8 * 40,
        slow_per_host_day=0.05,
        find_s=3600,
        restart_s=600,
    )
    own = waits_by_size(question)[-1]
    slow = FailureClass("slow", 0.05, "slow", Duration.fixed(60.0), slowdown=1.5)
    recovery = Recovery(0, 600, find_slow_s=3600)
    scenario = FailureScenario(Work(40, days=20), Failures((slow,)), recovery, Checkpoints(1e5, 0), Pool(spares=10))
    outcome = simulate(scenario, 30, seed=1)
    expected = (1 - own.restarts) / (1 + own.found)
    # A host that is found while the job restarts for another costs no restart of its own there.
    assert outcome.ettr.mean == pytest.approx(expected, abs=0.01)


def test_passes_that_vary_are_drawn_alike() -> None:
    """One micro-batch, no pipeline: the slowest of the groups' normal draws."""
    question = StragglerScenario(Spread(pass_sigma=0.02), 8 * 64)
    drawn = np.random.default_rng(1).normal(1, 0.02, (4000, 64)).max(axis=1)
    own = waits_by_size(question)[-1]
    assert own.alike == pytest.approx(drawn.mean() - 1, rel=0.02)
    assert own.unfound_step_sigma == pytest.approx(drawn.std(), rel=0.05) and own.unfound_run_sigma == 0


@given(
    share=st.floats(0, 1),
    excess=st.floats(0, 5),
    sigma=st.floats(0, 0.3),
    rate=st.floats(0, 10),
    find_s=st.floats(0, 1e6),
    groups=st.integers(1, 3000),
)
@settings(max_examples=40, deadline=None)
def test_more_hosts_wait_longer(
    share: float, excess: float, sigma: float, rate: float, find_s: float, groups: int
) -> None:
    spread = Spread(sigma, round(sigma / 2, 2), share, excess)
    question = StragglerScenario(spread, 8 * groups, slow_per_host_day=rate, find_s=find_s, restart_s=60)
    rows = waits_by_size(question)
    for before, after in pairwise(rows):
        assert after.unfound >= before.unfound - 1e-6 and after.alike >= before.alike - 1e-6
    for row in rows:
        assert -1e-9 <= row.alike <= row.unfound + 1e-6 and 0 <= row.restarts < 1
    assert question.share_found == pytest.approx(1 - 1 / (1 + rate * find_s / DAY_S))


def test_nonsense_is_refused() -> None:
    question = StragglerScenario(MEGASCALE, 64)
    for change in (
        {"devices": 63},
        {"devices": 0},
        {"compute_s": 0.0},
        {"find_s": -1.0},
        {"slow_per_host_day": float("nan")},
        {"spread": Spread(slow_share=1.5)},
        {"spread": Spread(pass_sigma=-1)},
    ):
        with pytest.raises(UserError):
            replace(question, **change)  # type: ignore[arg-type]
