"""A collector that repeats its last value is said, and what it shows blames nobody."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.detection import Detection
from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.repeated_values import find_repeats
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

LEVELS = (0.0, 0.2, 1.0, 380.0, 0.95, 0.4, 9e10)
GPUS = tuple(one for one in DETECTED if one.startswith("gpu"))


def job(samples: int = 700) -> MetricTable:
    """Steps of 5 s; no pause frames, and duty is always 100 %: both stand still for good reasons."""
    random = np.random.default_rng(1)
    steps = 1 - 0.4 * (np.arange(samples) % 5 == 4)
    noise = steps * (1 + 0.03 * random.standard_normal((len(LEVELS), 8, samples)))
    noise[2] = 1
    values = (np.array(LEVELS)[:, None, None] * noise).astype(np.float32)
    return MetricTable(values, DETECTED, tuple(f"h{number}" for number in range(8)), 1_700_000_000.0)


def stick(table: MetricTable, metrics: tuple[str, ...], since: int, end: int | None = None) -> None:
    """The collector of h2 repeats what it had a sample before."""
    for name in metrics:
        table.of(name)[2, since:end] = table.of(name)[2, since - 1]


def told(table: MetricTable) -> list[Detection]:
    return list(judge_machines(table, MinderPolicy()).detections)


@pytest.mark.parametrize("metrics", [DETECTED, GPUS])
def test_a_collector_that_repeats_is_said_and_blames_nobody(metrics: tuple[str, ...]) -> None:
    table = job()
    stick(table, metrics, 300)  # its last sample was a short part of a step: far from the median of the others
    (found,) = told(table)
    assert found.advice == "watch" and not found.blamed_hosts
    assert found.sentence.startswith("h2: its collector repeats a value of")
    assert found.since.unix_s == 1_700_000_300


def test_what_stands_still_for_good_reasons_is_no_repetition() -> None:
    table = job()
    assert not find_repeats(table)
    table.of("gpu_power_draw")[2, 300:] = table.of("gpu_power_draw")[2, 299]  # one metric alone
    assert not find_repeats(table)


def test_a_machine_that_died_stands_at_values_that_it_never_had() -> None:
    table = job()
    for name, level in zip(GPUS, (0.0, 70.0, 0.0, 0.0, 0.0), strict=True):
        table.of(name)[2, 300:] = level
    assert not find_repeats(table)
    assert judge_machines(table, MinderPolicy()).blamed_hosts == ("h2",)


def test_its_host_metrics_still_count_where_those_of_its_gpus_repeat() -> None:
    table = job()
    stick(table, GPUS, 300)
    table.of("pfc_tx_packet_rate")[2, 300:] = 5_000
    assert judge_machines(table, MinderPolicy()).blamed_hosts == ("h2",)


def test_a_followed_job_says_it_once() -> None:
    table = job()
    stick(table, DETECTED, 300)
    follow = FollowedJob(table.between(0, 100), MinderPolicy())
    verdicts = follow.begin()
    for end in range(120, 701, 20):
        verdicts += follow.add(table.between(end - 40, end))
    (found,) = [one for verdict in verdicts for one in verdict.detections]
    assert found.what == "collector that repeats values"
