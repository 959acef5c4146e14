"""One machine works and all others wait for it, spinning: a phase of the job, unless it lasts too long or is a hang."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable

LEVELS = (100.0, 0.2, 0.96, 380.0, 0.95, 0.4, 9e10)
SINCE = 250


def waiting(samples: int = 600, stopped_s: int = 0, writes: float = 0.3, *, computes: bool = False) -> MetricTable:
    """From 250 s on all others spin; h0 computes as before, or its GPUs rest while its host writes.

    Args:
        stopped_s: by how much its GPUs stop before the others'.
        writes: rise of its CPU usage.
    """
    random = np.random.default_rng(1)
    steps = 1 - 0.2 * (np.arange(samples) % 5 == 4)
    noise = 1 + 0.03 * random.standard_normal((len(LEVELS), 8, samples))
    values = (np.array(LEVELS)[:, None, None] * steps * noise).astype(np.float32)
    table = MetricTable(values, DETECTED, tuple(f"h{number}" for number in range(8)), 1_700_000_000.0)

    def become(metric: str, machines: slice, since: int, level: float) -> None:
        part = table.of(metric)[machines, since:]
        part[:] = level * (1 + 0.02 * random.standard_normal(part.shape))

    for metric, level in (("gpu_tensor_core_activity", 0.0), ("gpu_nvlink_bandwidth", 0.0), ("gpu_power_draw", 150.0)):
        become(metric, slice(1, 8), SINCE, level)
    table.of("gpu_duty_cycle")[1:, SINCE:] = 1
    if not computes:
        for metric, level in zip(DETECTED[2:], (0.0, 95.0, 0.0, 0.0, 0.0), strict=True):
            become(metric, slice(0, 1), SINCE - stopped_s, level)
        table.of("cpu_usage")[0, SINCE - stopped_s :] += writes
    return table


@pytest.mark.parametrize("metrics", [DETECTED, ("gpu_duty_cycle", "gpu_power_draw")])
def test_who_computes_while_all_others_spin_is_not_blamed(metrics: tuple[str, ...]) -> None:
    found = judge_machines(waiting(computes=True).only(metrics), MinderPolicy()).detections
    assert found and all(one.advice == "watch" for one in found)
    assert found[0].what in ("works while others wait", "busier than idle machines")


def test_who_may_save_while_all_others_spin_is_not_blamed() -> None:
    (found,) = judge_machines(waiting(), MinderPolicy()).detections
    assert found.advice == "watch" and found.what == "may save while others wait"


@pytest.mark.campaign(but=("table3-300.0", "table4-300.0"))
@pytest.mark.parametrize(
    ("table", "pause_s"),
    [
        (waiting(writes=0.0), 600.0),  # its host does no more than before
        (waiting(stopped_s=15), 600.0),  # the others waited for it only later
        (waiting(), 300.0),  # for too long
        (waiting(computes=True), 300.0),  # a kernel that never ends computes, too
        (waiting(computes=True).only(("gpu_duty_cycle", "gpu_power_draw")), 300.0),
    ],
)
def test_a_hang_is_blamed(table: MetricTable, pause_s: float) -> None:
    assert judge_machines(table, MinderPolicy(pause_s=pause_s)).blamed_hosts == ("h0",)


def test_who_is_followed_is_excused_for_a_time_and_blamed_afterwards() -> None:
    table = waiting(700)
    follow = FollowedJob(table.between(0, 100), MinderPolicy(pause_s=400))
    told = follow.begin()
    for end in range(120, 701, 20):
        told += follow.add(table.between(end - 40, end))
    found = [one for verdict in told for one in verdict.detections]
    assert [one.advice for one in found] == ["watch", "evict"] and found[1].blamed_hosts == ("h0",)


def test_a_save_that_ended_is_never_blamed() -> None:
    table = waiting(900)
    work = waiting(900, computes=True).values[:, 0]
    table.values[:, :, SINCE + 300 :] = work[:, None, SINCE + 300 :]
    assert not judge_machines(table, MinderPolicy(pause_s=400)).blamed_hosts
