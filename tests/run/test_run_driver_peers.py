"""Hosts held against each other through the driver's shell: one that is slow is named, in time, and no healthy one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from driver_helpers import Town, running

from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.judgements import SlowWatch
from phalanx.run.judge.stragglers import SlowConfig
from phalanx.run.messages import HostState, WorkerState, heartbeat

HOSTS = 256
HOST = HostState(0.0, 0, 0, 0)
NAMES = [f"h{number:03}" for number in range(HOSTS)]


class Cluster:
    """Own times of hosts, step by step: jitter, differences that last, what is common, and stalls (Pareto, 1 %)."""

    def __init__(self, seed: int, slow: int | None = None, ratio: float = 1.1, begins: int = 100) -> None:
        self.random = np.random.default_rng(seed)
        self.lasting = self.random.normal(0, 0.01, HOSTS)
        self.slow, self.ratio, self.begins = slow, ratio, begins

    def block(self, first: int, count: int) -> np.ndarray:
        """Steps from `first` on; rows are steps."""
        logs = self.lasting + self.random.normal(0, 0.04, (count, HOSTS)) + self.random.normal(0, 0.05, (count, 1))
        stalls = np.minimum(self.random.pareto(1.5, logs.shape), 19.0)
        times = 0.8 * np.exp(logs) * (1 + np.where(self.random.random(logs.shape) < 0.01, stalls, 0.0))
        if self.slow is not None:
            times[np.arange(first, first + count) >= self.begins, self.slow] *= self.ratio
        return times


def run(cluster: Cluster, step_s: float, steps: int, config: SlowConfig | None = None) -> list[tuple[str, int]]:
    """Who is named at which step, where hosts report once a second, each at its own part of the second."""
    watch = SlowWatch(1, NAMES, config or SlowConfig(), 1.0)
    per_beat = max(1, round(1 / step_s))
    named: list[tuple[str, int]] = []
    done, now_s = 0, 0.0
    while done < steps:
        times = cluster.block(done, per_beat)
        done += per_beat
        now_s += per_beat * step_s
        for index, name in enumerate(NAMES):
            busy_s = float(np.sort(times[:, index])[(per_beat - 1) // 2])
            report = [WorkerState(index, 1, "running", done, busy_s=busy_s, steps_here=done)]
            watch.on_heartbeat(name, heartbeat(1, 0.0, 1, report, HOST, []), Now(now_s + 0.5 * index / HOSTS, now_s))
        named += [(event.host, done) for event in watch.look(Now(now_s + 0.6, now_s))]  # type: ignore[union-attr]
    return named


@pytest.mark.campaign(but=("1-4.0", "2-0.05"))
@pytest.mark.parametrize("step_s", [4.0, 0.8, 0.25, 0.05])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_host_of_256_that_is_a_tenth_slower_is_named_within_200_steps(seed: int, step_s: float) -> None:
    settled = 12 * max(1, round(1 / step_s))  # until it is known how many steps go into a heartbeat
    cluster = Cluster(seed, slow=seed * 70, begins=100 + settled)
    named = run(cluster, step_s, 300 + settled)
    assert [name for name, _ in named] == [NAMES[seed * 70]]
    assert named[0][1] <= 300 + settled


@pytest.mark.campaign(but=("0-0.8", "1-0.05"))
@pytest.mark.slow
@pytest.mark.parametrize("step_s", [0.8, 0.05])
@pytest.mark.parametrize("seed", range(10))
def test_no_healthy_host_is_named(seed: int, step_s: float) -> None:
    assert run(Cluster(seed), step_s, 600 if step_s > 0.5 else 4000) == []


def test_a_script_that_does_not_report_it_is_not_judged() -> None:
    watch = SlowWatch(1, NAMES[:2], SlowConfig(), 1.0)
    for second in range(100):
        for name in NAMES[:2]:
            report = [WorkerState(0, 1, "running", second, steps_here=second)]
            watch.on_heartbeat(name, heartbeat(1, 0.0, 1, report, HOST, []), Now(second, second))
        assert watch.look(Now(second, second)) == []


@pytest.fixture(name="town")
def town_fixture(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path, NAMES, Job("j", hosts=HOSTS, workers_per_host=1), Policy())
    append = town.journal.append_all
    kept: list[object] = []
    town.journal.append_all = lambda drafts: kept.extend(drafts) or len(kept)  # type: ignore[method-assign]
    town.begin()
    yield town
    town.journal.append_all = append  # type: ignore[method-assign]
    town.journal.close()


def test_people_are_told_of_a_slow_host(town: Town) -> None:
    """Through the whole driver, 256 hosts with a step a second: exactly one alert."""
    random = np.random.default_rng(7)
    town.until(running(1))
    began = town.hosts[NAMES[0]].steps
    while not town.told and town.hosts[NAMES[0]].steps < began + 320:
        logs = random.normal(0, 0.04, HOSTS) + random.normal(0, 0.05)
        for index, host in enumerate(town.hosts.values()):
            slow = 1.1 if index == 99 and host.steps >= began + 100 else 1.0
            host.busy_s = 0.8 * float(np.exp(logs[index])) * slow
        town.go_on(1)
    [alert] = town.told
    assert isinstance(alert, actions.Alert) and alert.host == NAMES[99] and "times as long" in alert.text
    assert town.hosts[NAMES[0]].steps < began + 300
    assert not town.sent(messages.Stop)
