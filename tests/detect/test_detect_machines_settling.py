"""A first minute in which the job does something else teaches nothing that lasts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from phalanx.detect.minder.job_work import JobWork
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.online_minder import OnlineMinder
from phalanx.detect.monitoring.job_scenarios import Scenario, draw_scenario
from phalanx.detect.monitoring.load_model import Phase
from phalanx.detect.monitoring.metric_catalogue import DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate


def begins_with(kind: str, until_s: float, number: int, fault: str | None = None, duration_s: int = 900) -> Scenario:
    """A job whose first minute is an evaluation or a restart."""
    scenario = draw_scenario("develop", number, machines=32, fault=fault, duration_s=duration_s)
    later = (one for one in scenario.phases if one.kind not in ("evaluation", "restart") or one.start_s > until_s + 60)
    return dataclasses.replace(scenario, phases=(Phase(kind, -20, until_s), *later))


@pytest.mark.campaign(but=("791005",))
@pytest.mark.parametrize("number", [791_005, 791_028])
def test_machines_that_did_the_same_in_an_evaluation_are_healthy(number: int) -> None:
    """In it stages do not wait for each other, and oddities have other sizes."""
    table = generate(begins_with("evaluation", 75, number, duration_s=1800), DETECTED).table
    verdict = judge_machines(table, MinderPolicy())
    assert not verdict.blamed_hosts, verdict.sentence


def test_habits_of_half_a_restart_are_learnt_anew_once_the_job_trains() -> None:
    """They are of neither state: machines at the edge of a stage were taken for those of the other one."""
    scenario = begins_with("restart", 170, 791_005, duration_s=300)
    scenario = dataclasses.replace(scenario, phases=(dataclasses.replace(scenario.phases[0], start_s=25),))
    scaled = normalise(generate(scenario, DETECTED).table).values
    changed_at, before = [], None
    minder = OnlineMinder(32, DETECTED, MinderPolicy(), shipped_numbers())
    for end in (200, 240, 260, 300):
        minder.add(scaled[:, :, minder.seen : end])
        habit = minder.histories["gpu_nvlink_bandwidth"].habit.copy()
        if before is not None and np.abs(habit - before).mean() > 0.3 * np.abs(before).mean():
            changed_at.append(end)
        before = habit
    assert changed_at == [260]


def test_a_fault_after_such_a_minute_is_found() -> None:
    scenario = begins_with("evaluation", 75, 792_001, fault="CUDA execution error")
    assert scenario.fault is not None and scenario.fault.start_s > 200
    verdict = judge_machines(generate(scenario, DETECTED).table, MinderPolicy())
    assert verdict.blamed_hosts == tuple(f"host-{machine:04d}" for machine in scenario.fault.machines)


def test_habits_are_learnt_anew_at_the_same_sample_whether_samples_come_together_or_not() -> None:
    scaled = normalise(generate(begins_with("evaluation", 75, 791_005, duration_s=1800), DETECTED).table).values
    whole, pieces = (OnlineMinder(32, DETECTED, MinderPolicy(), shipped_numbers()) for _ in range(2))
    whole.add(scaled[:, :, :120])
    assert all(one.groups is None for one in whole.histories.values())  # stages look alike so far
    whole.add(scaled[:, :, 120:300])
    for start in range(0, 300, 17):
        pieces.add(scaled[:, :, start : min(start + 17, 300)])
    for one, other in zip(whole.histories.values(), pieces.histories.values(), strict=True):
        assert one.groups is not None and other.groups is not None
        np.testing.assert_array_equal(one.groups, other.groups)
        np.testing.assert_allclose(one.habit, other.habit, atol=1e-6)


def test_more_work_is_told_from_less_and_from_what_nobody_measured() -> None:
    work = JobWork(("gpu_power_draw", "cpu_usage"), 60)
    random = np.random.default_rng(5)

    def add(level: float) -> None:
        values = level * (1 + 0.02 * random.standard_normal((2, 8, 60)).astype(np.float32))
        values[:, 0, :50] = np.nan
        work.add(values)

    add(0.5)
    assert not work.is_more()
    work.learn()
    for level, is_more in ((0.5, False), (0.48, False), (0.55, True), (0.51, False), (np.nan, False)):
        add(level)
        assert work.is_more() is is_more
