"""Hosts that are asked at other moments of a second than their peers see other parts of a step, and are healthy."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

LEVELS = {  # while it computes, exchanges gradients, updates
    "pfc_tx_packet_rate": (5.0, 260.0, 1.0),
    "cpu_usage": (0.2, 0.24, 0.14),
    "gpu_duty_cycle": (0.98, 0.97, 0.95),
    "gpu_power_draw": (480.0, 250.0, 330.0),
    "gpu_graphics_engine_activity": (0.97, 0.96, 0.96),
    "gpu_tensor_core_activity": (0.48, 0.02, 0.01),
    "gpu_nvlink_bandwidth": (110e9, 60e9, 0.0),
}


def sampled(seed: int, machines: int, samples: int = 700) -> MetricTable:
    """A healthy job with steps of nearly whole seconds, whose gauges are samples at a phase of each host."""
    random = np.random.default_rng((22, seed))
    step_s = float(random.integers(2, 9)) + float(random.uniform(-0.03, 0.03))
    gradients_s = float(random.uniform(0.08, 0.3)) * step_s
    moments_s = np.arange(samples) + random.uniform(0, 1, (machines, 1)) + random.uniform(0, step_s)
    in_step_s = (moments_s + random.uniform(0, 0.02, moments_s.shape)) % step_s
    part = np.where(in_step_s < gradients_s, 1, np.where(in_step_s < gradients_s + 0.03 * step_s, 2, 0))
    values = np.stack([np.array(LEVELS[name])[part] for name in DETECTED])
    values *= 1 + 0.012 * random.standard_normal((len(DETECTED), machines, 1))
    values *= 1 + 0.02 * random.standard_normal(values.shape)
    names = tuple(f"h{number}" for number in range(machines))
    return MetricTable(values.astype(np.float32), DETECTED, names, 1_700_000_000.0)


@pytest.mark.campaign(but=("1003-12", "4-17"))
@pytest.mark.parametrize(
    ("seed", "machines"), [(0, 32), (1, 38), (2, 29), (4, 17), (5, 23), (1003, 12), (1001, 6), (1000, 4)]
)
def test_random_phases_blame_nobody(seed: int, machines: int) -> None:
    verdict = judge_machines(sampled(seed, machines), MinderPolicy())
    assert not verdict.blamed_hosts, verdict.sentence


def test_what_blames_nobody_hides_no_fault() -> None:
    """Others were told to differ a little before, in the same metrics."""
    table = sampled(1003, 12)
    for name in ("gpu_duty_cycle", "gpu_power_draw", "gpu_tensor_core_activity", "gpu_nvlink_bandwidth"):
        table.of(name)[4, 300:] = 0.02 * CATALOGUE[name].upper
    verdict = judge_machines(table, MinderPolicy())
    assert verdict.blamed_hosts == ("h4",) and verdict.detections[0].since.unix_s == table.start_s + 300
    assert any(one.advice == "watch" for one in verdict.detections)


def test_a_machine_whose_gpus_do_less_is_no_matter_of_sampling() -> None:
    table = sampled(1003, 12)
    table.of("gpu_power_draw")[5, 300:] *= 0.6
    table.of("gpu_tensor_core_activity")[5, 300:] *= 0.6
    assert judge_machines(table, MinderPolicy()).blamed_hosts == ("h5",)
