"""Since when a machine differs: found in hindsight by its samples, so that the alarm comes when the time is over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.onset_estimate import peers_of, refine_onset
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_generator import generate


def apart(size: float, onset: int, samples: int = 360, noise: float = 0.01, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = noise * random.standard_normal(samples)
    values[onset:] += size
    return values.astype(np.float32)


@settings(max_examples=60)
@given(st.integers(150, 180), st.integers(-4, 30), st.sampled_from([-0.5, -0.1, 0.06, 0.3]), st.integers(0, 999))
def test_a_crossing_that_is_late_is_brought_to_the_onset(onset: int, late: int, size: float, seed: int) -> None:
    assert abs(refine_onset(apart(size, onset, seed=seed), onset + late, 1.0) - onset) <= 2


def test_what_comes_and_goes_has_its_onset_at_the_first_time() -> None:
    values = apart(0.0, 0)
    values[170:] += 0.3 * (np.arange(190) % 8 < 4)
    assert refine_onset(values, 185, 1.0) == 170


def test_a_slow_rise_is_found_before_half_of_it() -> None:
    values = apart(0.0, 0)
    values[160:] += np.clip(np.arange(200) / 20, 0, 1) * 0.4
    assert all(160 <= refine_onset(values, crossing, 1.0) <= 166 for crossing in range(165, 182))


def test_where_too_little_is_known_the_crossing_stays() -> None:
    values = apart(0.5, 160)
    values[:120] = np.nan
    assert refine_onset(values, 165, 1.0) == 165
    assert refine_onset(apart(0.5, 20), 25, 1.0) == 25


def test_peers_are_of_the_same_kind_and_not_more_than_needed() -> None:
    like = np.ones(1000, bool)
    like[500:] = False
    peers = peers_of(7, like)
    assert len(peers) == 64 and 7 not in peers and peers.max() < 500


@pytest.mark.parametrize(("number", "fault"), [(760_001, "CUDA execution error"), (760_006, "GPU execution error")])
def test_the_alarm_comes_when_the_time_of_continuity_since_the_true_onset_is_over(number: int, fault: str) -> None:
    scenario = draw_scenario("develop", number, fault=fault, machines=24)
    assert scenario.fault is not None
    (found, *_) = judge_machines(generate(scenario, DETECTED).table, MinderPolicy()).detections
    raised_s = float(found.figures["raised_unix_s"]) - scenario.start_unix_s
    assert -1.5 <= raised_s - scenario.fault.start_s - 240 <= 2


@pytest.mark.campaign(but=("730008",))
@pytest.mark.parametrize("number", [730_008, 730_013])
def test_who_spins_with_less_power_while_the_job_hangs_is_found(number: int) -> None:
    scenario = draw_scenario("develop", number, fault="GPU execution error", machines=100)
    assert scenario.fault is not None and scenario.fault.signature.state == "spinning"
    verdict = judge_machines(generate(scenario, DETECTED).table, MinderPolicy())
    (machine,) = scenario.fault.machines
    assert f"host-{machine:04d}" in verdict.blamed_hosts
    assert verdict.detections[0].figures["metric"] == "gpu_power_draw"
