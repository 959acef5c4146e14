"""The simulated year: what the faults of a small cluster do to a job is what can be reckoned by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.decide.policy import Job, Policy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = [f"n{number}" for number in range(6)]
HOUR_S = 3600.0


@pytest.fixture(name="year")
def year_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from support.year import cluster, trace

    return cluster, trace


def run(year: Any, effects: list[str], spares: int, seed: int = 1, nodes: int = 6) -> Any:
    """A day with a fault on each of the nodes in turn, an hour apart, each for half a day."""
    cluster, trace = year
    faults = [
        trace.Fault(NAMES[number], (number + 1) * HOUR_S, (number + 13) * HOUR_S, effect)
        for number, effect in enumerate(effects)
    ]
    job, policy = Job("y", 3, 2, spares), Policy(give_up_s=0.0, replace_slow=True)
    return cluster.Cluster(job, policy, NAMES[:nodes], faults, seed, cluster.Pace()).run(24 * HOUR_S)


def test_without_faults_nearly_all_of_the_time_trains(year: Any) -> None:
    tally = run(year, [], 0)
    assert 24 * HOUR_S - 400 < tally.work_s < 24 * HOUR_S - 60 and tally.recoveries == 0


@pytest.mark.parametrize("effect", ["dies", "fails", "hangs"])
def test_a_bad_host_costs_what_the_recovery_takes_and_is_not_kept(year: Any, effect: str) -> None:
    healthy, spare, cold = run(year, [], 1), run(year, [effect] * 2, 1), run(year, [effect] * 2, 0)
    assert spare.wrong == cold.wrong == 0 and spare.endings == cold.endings == []
    for tally in (spare, cold):
        assert tally.evictions <= 2 and tally.recoveries <= 4
    lost_s = healthy.work_s - spare.work_s
    assert 0 <= lost_s < 2 * (300 + 300)
    assert cold.recoveries == 0 or cold.waited_s > 800  # a node that is asked for takes a quarter of an hour


def test_the_same_seed_gives_the_same(year: Any) -> None:
    effects = ["dies", "fails", "hangs", "slow", "taken out"]
    assert run(year, effects, 1, seed=5) == run(year, effects, 1, seed=5)
    assert run(year, effects, 1, seed=5).endings == []


def test_repaired_nodes_come_back(year: Any) -> None:
    """Five of six nodes fail for half a day, so the job has to wait; at the end it trains."""
    tally = run(year, ["dies"] * 5, 0)
    assert tally.waited_s > HOUR_S and tally.work_s > 8 * HOUR_S and tally.endings == []


def test_without_the_faults_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "run_year.py"), "--quick", "--trace", str(tmp_path / "absent.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "left out: the faults are not there" in done.stdout


def test_a_trace_is_read_in_order(year: Any, tmp_path: Path) -> None:
    _, trace = year
    kind = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "GPU Lost"}
    times = [("fault_start", 1.0), ("fault_start", 1.5), ("fault_end", 2.0), ("fault_end", 4.0)]
    events = [{"node_id": "a", "event_time": at, "event_type": what, "fault_type": kind} for what, at in times]
    (tmp_path / "trace.json").write_text(json.dumps(events))
    found = trace.read_trace(tmp_path / "trace.json")
    assert [(fault.begins_s / trace.DAY_S, fault.ends_s / trace.DAY_S) for fault in found] == [(1.0, 2.0), (1.5, 4.0)]
    assert {fault.effect for fault in found} == {"fails"}
