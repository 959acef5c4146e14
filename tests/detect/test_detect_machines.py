"""The judge of machines on small jobs: faults are found, healthy machines are left alone, missing evidence is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import ConfidenceNumbers, shipped_numbers
from phalanx.detect.minder.online_minder import OnlineMinder
from phalanx.detect.monitoring.job_scenarios import SPLITS, draw_scenario
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate, machine_names
from phalanx.detect.monitoring.metric_table import MetricTable

START_S = 1_700_000_000.0
LEVELS = {
    "pfc_tx_packet_rate": 100.0,
    "cpu_usage": 0.2,
    "gpu_duty_cycle": 0.96,
    "gpu_power_draw": 380.0,
    "gpu_graphics_engine_activity": 0.95,
    "gpu_tensor_core_activity": 0.4,
    "gpu_nvlink_bandwidth": 9e10,
}

Change = Callable[[MetricTable], None]


def job(machines: int, samples: int = 620, seed: int = 0) -> MetricTable:
    """A job that computes in steps of 5 s, with noise."""
    random = np.random.default_rng(seed)
    steps = 1 - 0.2 * (np.arange(samples) % 5 == 4)
    values = np.stack(
        [
            level * steps * (1 + 0.03 * random.standard_normal((machines, samples)))
            for level in (LEVELS[name] for name in DETECTED)
        ]
    )
    names = tuple(f"h{number}" for number in range(machines))
    return MetricTable(values.astype(np.float32), DETECTED, names, START_S)


def stop(table: MetricTable, machines: list[int], first: int, end: int | None = None) -> None:
    """Processes of these machines are gone."""
    for name in ("gpu_duty_cycle", "gpu_power_draw", "gpu_graphics_engine_activity", "gpu_tensor_core_activity"):
        table.of(name)[machines, first:end] = 0.02 * CATALOGUE[name].upper


@pytest.mark.campaign(but=("4", "9"))
@pytest.mark.parametrize("machines", [4, 9, 40])
def test_the_machine_that_stopped_is_named_with_its_onset_after_the_time_of_continuity(machines: int) -> None:
    table = job(machines)
    stop(table, [2], 200)
    verdict = judge_machines(table, MinderPolicy())
    assert verdict.blamed_hosts == ("h2",), verdict
    (found,) = verdict.detections
    assert found.since.unix_s is not None and abs(found.since.unix_s - START_S - 200) <= 5
    assert found.figures["raised_unix_s"] == found.since.unix_s + 239
    assert found.figures["metric"] in DETECTED
    assert "h2 differs" in found.sentence


def test_what_lasts_shorter_than_the_time_of_continuity_is_no_fault() -> None:
    table = job(8)
    stop(table, [2], 200, 400)
    assert not judge_machines(table, MinderPolicy()).detections
    (found,) = judge_machines(table.between(0, 400), MinderPolicy(continuity_s=120)).detections
    assert found.blamed_hosts == ("h2",)
    (found,) = judge_machines(table, MinderPolicy(continuity_s=120)).detections
    assert found.advice == "watch" and found.who[0].name == "h2"  # it is over


def test_machines_behind_one_switch_are_one_incident() -> None:
    table = job(24)
    stop(table, [3, 4, 5, 6], 200)
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert set(found.blamed_hosts) == {"h3", "h4", "h5", "h6"}
    assert any("switch" in reason for reason in found.why)


def test_where_most_machines_change_the_job_has_changed() -> None:
    table = job(12)
    stop(table, [1, 2, 3, 4, 5, 6, 7], 200)
    assert not judge_machines(table, MinderPolicy()).detections


def test_healthy_groups_that_differ_are_left_alone_and_the_odd_one_within_is_found() -> None:
    table = job(24)
    for name in ("gpu_power_draw", "gpu_tensor_core_activity"):
        table.of(name)[12:] *= 1.3
        table.of(name)[12:, 300:] *= 0.9  # what the newer half does, it does together
    assert not judge_machines(table, MinderPolicy()).detections
    stop(table, [15], 250)
    assert judge_machines(table, MinderPolicy()).blamed_hosts == ("h15",)


def test_who_hangs_with_another_generation_is_not_blamed_for_its_own_power() -> None:
    ranges = dataclasses.replace(SPLITS["develop"], two_generations=1.0)
    for number, fault in ((610_010, "ECC error"), (610_012, "GPU execution error")):
        scenario = draw_scenario("develop", number, fault=fault, machines=60, ranges=ranges)
        assert scenario.fault is not None and len(set(scenario.group_of)) == 2
        found = judge_machines(generate(scenario, DETECTED).table, MinderPolicy()).detections
        names = machine_names(60)
        faulty = {names[one] for one in scenario.fault.machines}
        assert found and all(faulty & set(one.blamed_hosts) for one in found)


def test_a_part_of_the_job_is_never_blamed() -> None:
    table = job(40)
    stop(table, list(range(6)), 250)  # 15 %: more than a switch has
    assert not judge_machines(table, MinderPolicy()).detections
    table = job(40)
    stop(table, list(range(4)), 250)
    assert len(judge_machines(table, MinderPolicy()).blamed_hosts) == 4


def test_what_is_not_calibrated_takes_no_host_out() -> None:
    table = job(8)
    stop(table, [3], 250)
    unfitted = dataclasses.replace(shipped_numbers(), confidence=None)
    (found,) = judge_machines(table, MinderPolicy(), unfitted).detections
    assert found.advice == "check" and any("not calibrated" in one for one in found.why)
    fitted = dataclasses.replace(unfitted, confidence=ConfidenceNumbers(3.5, (0.0,) * 6))  # 0.97
    (found,) = judge_machines(table, MinderPolicy(), fitted).detections
    assert found.advice == "evict" and not any("not calibrated" in one for one in found.why)
    (found,) = judge_machines(table, MinderPolicy(evict_from=0.98), fitted).detections
    assert found.advice == "check"


def test_a_host_that_has_always_been_different_is_not_faulty() -> None:
    table = job(16)
    table.of("gpu_power_draw")[5] *= 0.9
    assert not judge_machines(table, MinderPolicy()).detections


@pytest.mark.parametrize("lost", [("gpu_duty_cycle", "gpu_power_draw"), DETECTED])
def test_metrics_that_vanish_name_the_machine(lost: tuple[str, ...]) -> None:
    table = job(8)
    for name in lost:
        table.of(name)[6, 300:] = np.nan
    verdict = judge_machines(table, MinderPolicy())
    assert verdict.blamed_hosts == ("h6",)
    assert "no longer delivers" in verdict.sentence
    assert verdict.detections[0].since.unix_s == START_S + 300


def test_a_collector_that_loses_a_metric_of_all_machines_blames_none() -> None:
    table = job(8)
    table.of("gpu_duty_cycle")[:, 300:] = np.nan
    assert not judge_machines(table, MinderPolicy()).detections


def test_gaps_are_no_fault() -> None:
    table = job(10)
    random = np.random.default_rng(3)
    table.values[random.random(table.values.shape) < 0.02] = np.nan
    table.values[:, 4, 200:225] = np.nan
    assert not judge_machines(table, MinderPolicy()).detections


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (job(3), "3 hosts cannot be compared"),
        (job(8, samples=200), "200 s of samples are too few, 300 are needed"),
        (job(8).only(()), "none of the metrics"),
    ],
)
def test_where_evidence_is_missing_it_abstains(table: MetricTable, words: str) -> None:
    verdict = judge_machines(table, MinderPolicy())
    assert not verdict.detections and verdict.exit_status == 3
    assert words in verdict.abstains[0] and ";" in verdict.abstains[0]


def test_pieces_of_any_size_give_the_same_incidents() -> None:
    table = job(9)
    table.values[:, 3, 150:160] = np.nan
    stop(table, [2], 210)
    table.of("gpu_duty_cycle")[7, 320:] = np.nan
    values = normalise(table).values
    numbers = shipped_numbers()

    def judged(sizes: list[int]) -> list[object]:
        minder = OnlineMinder(9, DETECTED, MinderPolicy(), numbers)
        at, turn = 0, 0
        while at < values.shape[2]:
            minder.add(values[:, :, at : at + sizes[turn % len(sizes)]])
            at += sizes[turn % len(sizes)]
            turn += 1
        return [(one.machines, one.metric, one.since, one.at) for one in minder.found]

    whole = judged([values.shape[2]])
    assert len(whole) == 2
    assert judged([1]) == judged([37, 5]) == whole


def test_tables_that_overlap_are_judged_once() -> None:
    table = job(8)
    stop(table, [2], 250)
    followed = FollowedJob(table.between(0, 100), MinderPolicy(), clock_s=lambda: START_S + 100)
    found = followed.begin()
    assert followed.minutes_needed() == pytest.approx(10 / 60)
    for end in range(105, 621, 15):
        found += followed.add(table.between(max(0, end - 40), end))
    (verdict,) = found
    whole = judge_machines(table, MinderPolicy())
    assert verdict.blamed_hosts == ("h2",)
    assert verdict.detections[0].since == whole.detections[0].since


def test_a_followed_job_takes_machines_by_name() -> None:
    table = job(8)
    stop(table, [2], 250)
    followed = FollowedJob(table.between(0, 240), MinderPolicy())
    followed.begin()
    turned = MetricTable(table.values[:, ::-1], table.metrics, table.machines[::-1], START_S)
    (verdict,) = followed.add(turned)
    assert verdict.blamed_hosts == ("h2",)
