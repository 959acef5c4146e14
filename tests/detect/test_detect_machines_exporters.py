"""Metrics that vanish where nothing else changes: an exporter that died is no ground to take its machine out."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

LEVELS = (100.0, 0.2, 0.96, 380.0, 0.95, 0.4, 9e10)
HOST = ("cpu_usage", "pfc_tx_packet_rate")
GPUS = tuple(one for one in DETECTED if one.startswith("gpu"))


def job(machines: int = 8, samples: int = 700) -> MetricTable:
    """A job in steps of 5 s; the metrics of a host are those of `HOST`, the others are of its GPUs."""
    random = np.random.default_rng(1)
    steps = 1 - 0.2 * (np.arange(samples) % 5 == 4)
    noise = 1 + 0.03 * random.standard_normal((len(LEVELS), machines, samples))
    values = (np.array(LEVELS)[:, None, None] * steps * noise).astype(np.float32)
    return MetricTable(values, DETECTED, tuple(f"h{number}" for number in range(machines)), 1_700_000_000.0)


def hang(table: MetricTable, since: int, but: int) -> None:
    """All others wait: their GPUs spin."""
    others = [one for one in range(len(table.machines)) if one != but]
    for name, level in (("gpu_tensor_core_activity", 0.0), ("gpu_nvlink_bandwidth", 0.0), ("gpu_power_draw", 150.0)):
        noise = 1 + 0.02 * np.random.default_rng(2).standard_normal((len(others), table.samples - since))
        table.of(name)[others, since:] = level * noise


def lose(table: MetricTable, metrics: tuple[str, ...], value: float = np.nan) -> None:
    for name in metrics:
        table.of(name)[3, 300:] = value


@pytest.mark.campaign(but=("nan-lost0", "inf-lost1"))
@pytest.mark.parametrize("lost", [HOST, HOST[:1]])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_host_metrics_that_end_while_the_gpus_go_on_blame_nobody(lost: tuple[str, ...], value: float) -> None:
    table = job()
    lose(table, lost, value)
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert found.advice == "watch" and not found.blamed_hosts
    assert "exporter" in found.what and "GPUs and the job go on" in found.why[0]


def test_host_metrics_that_end_as_the_job_hangs_are_to_be_checked() -> None:
    table = job()
    lose(table, HOST)
    hang(table, 302, but=-1)
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert found.advice == "check" and found.blamed_hosts == ("h3",)


@pytest.mark.campaign(but=("lost0",))
@pytest.mark.parametrize("lost", [GPUS, DETECTED])
def test_who_is_no_longer_heard_of_is_checked_where_the_job_goes_on_and_taken_out_where_it_waits(
    lost: tuple[str, ...],
) -> None:
    table = job()
    lose(table, lost)
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert found.advice == "check" and found.confidence <= 0.6 and "no other machine slows" in found.why[0]
    hang(table, 303, but=3)
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert found.advice == "evict" and found.blamed_hosts == ("h3",)


def test_where_no_metric_shows_work_it_is_checked() -> None:
    table = job()
    lose(table, HOST)
    (found,) = judge_machines(table.only(HOST), MinderPolicy()).detections
    assert found.advice == "check" and "no metric shows whether the job goes on" in found.why[0]


def test_values_that_cannot_be_are_no_samples_and_are_said() -> None:
    table = job()
    lose(table, HOST[:1], 1e30)
    verdict = judge_machines(table, MinderPolicy())
    (found,) = verdict.detections
    assert found.advice == "watch" and "no longer delivers cpu_usage" in found.sentence
    (said,) = verdict.abstains
    assert "h3 gives values of cpu_usage that cannot be, such as 1e+30, from" in said
    table = job()
    table.of("gpu_power_draw")[3, 300] = 2_147_483_632  # what DCGM sends for a value it lacks
    verdict = judge_machines(table, MinderPolicy())
    assert verdict.exit_status == 0 and "1 value that cannot be left out, such as 2.147e+09" in verdict.sentence


def test_a_followed_job_takes_them_for_no_samples_too() -> None:
    table = job()
    lose(table, HOST[:1], np.inf)
    (verdict,) = FollowedJob(table, MinderPolicy()).begin()
    assert "no longer delivers cpu_usage" in verdict.sentence and not verdict.blamed_hosts


def test_metrics_that_end_on_all_machines_are_said() -> None:
    table = job()
    table.of("gpu_power_draw")[:, 300:] = np.nan
    verdict = judge_machines(table, MinderPolicy())
    assert verdict.exit_status == 3 and "gpu_power_draw ended at" in verdict.sentence
    whole = judge_machines(table.between(0, 400), MinderPolicy())
    assert whole.exit_status == 0, "it may come back"
