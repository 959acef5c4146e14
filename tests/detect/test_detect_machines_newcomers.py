"""A host that comes later is what it is: its first minute is its habit, as the first minute of all is theirs."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.minder.fault_guess import changes_of
from phalanx.detect.minder.incident_weight import light_reason
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

LEVELS = (100.0, 0.2, 0.96, 380.0, 0.95, 0.4, 9e10)


def job(machines: int = 12, samples: int = 800) -> MetricTable:
    random = np.random.default_rng(1)
    steps = 1 - 0.2 * (np.arange(samples) % 5 == 4)
    noise = steps * (1 + 0.03 * random.standard_normal((len(LEVELS), machines, samples)))
    values = (np.array(LEVELS)[:, None, None] * noise).astype(np.float32)
    return MetricTable(values, DETECTED, tuple(f"h{number}" for number in range(machines)), 1_700_000_000.0)


def newcomer() -> MetricTable:
    """From 300 s on there is h5, of another generation."""
    table = job()
    table.of("gpu_power_draw")[5] *= 0.8
    table.of("cpu_usage")[5] *= 1.5
    table.values[:, 5, :300] = np.nan
    return table


@pytest.mark.parametrize("period_s", [1.0, 2.0])
def test_a_spare_of_another_generation_that_joins_late_is_not_blamed(period_s: float) -> None:
    table = newcomer()
    table = MetricTable(table.values, table.metrics, table.machines, table.start_s, period_s)
    assert not judge_machines(table, MinderPolicy()).detections


def test_what_it_does_after_its_first_minute_is_judged() -> None:
    table = newcomer()
    table.of("gpu_power_draw")[5, 450:] *= 0.6
    (found,) = judge_machines(table, MinderPolicy()).detections
    assert found.blamed_hosts == ("h5",) and abs(float(found.since.unix_s or 0) - 1_700_000_450) <= 3


def test_who_is_below_the_threshold_and_as_the_others_are_is_no_alarm() -> None:
    table = job()
    table.of("gpu_power_draw")[2, 300:] *= 0.9  # of this an alarm of its own would tell
    found = FaultyMachines((2,), "gpu_nvlink_bandwidth", 300, 560, 0.9, 0.41, (), ("gpu_power_draw",), ())
    light = light_reason(found, table, changes_of(table, 2, 300, 560), 0, 600.0)
    assert light is not None and light.what == "small difference"
