"""The recorded year: what is read, what it is drawn from, and that it lies where drawn years do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.simulate import failure_trace
from phalanx.simulate.failure_model import DAY_S, Checkpoints, FailureScenario, Pool, Recovery, Work, load_failures
from phalanx.simulate.failure_simulation import simulate, simulate_histories
from phalanx.simulate.failure_trace import Fault, by_blocks, by_hosts, rates_of, read_trace, replay

YEAR = Path(__file__).parents[3] / "shared" / "data" / "faults" / "infinitehbd-fault-trace" / "fault_trace.json"
has_year = pytest.mark.skipif(not YEAR.exists(), reason="the recorded year is not here")


def event(node: str, days: float, kind: str, class_name: str = "GPU", words: str = "GPU Lost") -> dict[str, Any]:
    told = {"Level": "Hardware Failure", "Class": class_name, "Desc": words}
    return {"node_id": node, "event_time": days, "event_type": f"fault_{kind}", "fault_type": told}


def test_faults_are_read_in_order_with_what_they_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        event("a", 1, "start"),
        event("b", 2, "start", "NIC", "NIC Lost"),
        event("a", 2.5, "start", "Fan", "Fan"),
        event("a", 3, "end"),
        event("b", 3, "end"),
        event("a", 4, "end"),
        event("c", 5, "start", "GPU", "GPU PCI link width low"),
    ]
    path.write_text(json.dumps(events))
    faults = read_trace(path)
    assert [(f.node, f.begins_s / DAY_S, f.ends_s / DAY_S, f.effect, f.kind) for f in faults] == [
        ("a", 1, 3, "fails", "GPU"),
        ("b", 2, 3, "hangs", "NIC"),
        ("a", 2.5, 4, "taken out", "Fan"),
    ]
    rates = rates_of(faults, nodes=4, days=10)
    assert rates.per_host_day("stops") == pytest.approx(2 / 40) and rates.per_host_day("slow") == 0
    assert [c.repair.mean_s / DAY_S for c in rates.classes] == [0, 2, 1, 0, 1.5]


@pytest.mark.parametrize("content", ["", "{", '[{"node_id": 1}]', "[3]", '{"a": 1}', "\x00"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"no trace of faults; give fault_trace\.json"):
        read_trace(path)
    with pytest.raises(UserError, match="cannot read it"):
        read_trace(tmp_path / "absent.json")


FAULTS = [
    Fault("a", 1 * DAY_S, 3 * DAY_S, "fails"),
    Fault("b", 2 * DAY_S, 2.5 * DAY_S, "dies"),
    Fault("b", 7 * DAY_S, 9 * DAY_S, "slow"),
]


def test_a_replay_has_all_faults_at_their_times_on_hosts_of_its_own() -> None:
    history = replay(FAULTS, runs=50, nodes=5)
    assert history.is_fixed
    for run in range(50):
        assert history.times_s[run].tolist() == [DAY_S, 2 * DAY_S, 7 * DAY_S, np.inf]
        assert history.repairs_s[run].tolist()[:3] == [2 * DAY_S, 0.5 * DAY_S, 2 * DAY_S]
        a, b, again = history.hosts[run, :3].tolist()
        assert a != b == again
    assert len(set(history.hosts[:, 0].tolist())) == 5


def test_years_drawn_by_hosts_have_whole_years_of_hosts() -> None:
    history = by_hosts(FAULTS, runs=400, nodes=5, seed=1)
    counts = np.isfinite(history.times_s).sum(axis=1)
    assert counts.mean() == pytest.approx(3, abs=0.4) and counts.std() > 0.5
    for run in range(400):
        times_s, hosts = history.times_s[run], history.hosts[run]
        for host in set(hosts[np.isfinite(times_s)].tolist()):
            assert times_s[(hosts == host) & np.isfinite(times_s)].tolist() in ([DAY_S], [2 * DAY_S, 7 * DAY_S])


def test_years_drawn_by_blocks_have_as_many_faults_on_average() -> None:
    history = by_blocks(FAULTS, runs=600, nodes=5, days=10, block_days=3, seed=1)
    assert np.isfinite(history.times_s).sum() / 600 == pytest.approx(3, abs=0.25)
    finite = history.times_s[np.isfinite(history.times_s)]
    assert finite.min() >= 0 and finite.max() < 10 * DAY_S
    # Any time is as likely as any other.
    assert np.histogram(finite, bins=5, range=(0, 10 * DAY_S))[0] / 600 == pytest.approx([0.6] * 5, abs=0.15)


def test_two_faults_of_one_host_add_up() -> None:
    """One from the first to the third day, one from the second to the fifth: away for four days."""
    faults = [Fault("a", DAY_S, 3 * DAY_S, "fails"), Fault("a", 2 * DAY_S, 5 * DAY_S, "fails")]
    scenario = FailureScenario(Work(2, days=10), rates_of(faults, 2, 10), Recovery(0, 0), Checkpoints(600, 0))
    outcome = simulate_histories(scenario, [replay(faults, 3, nodes=2)])
    assert outcome.shares["waiting for hosts"].mean == pytest.approx(0.4, abs=0.001)


def layout(hosts: int, spares: int, shrinks: bool) -> FailureScenario:
    """As in benchmarks/run_year.py."""
    return FailureScenario(
        Work(hosts, days=failure_trace.DAYS),
        rates_of(read_trace(YEAR)),
        Recovery(5, 62.6, find_slow_s=1000, saves_first=False),
        Checkpoints(300, 0),
        Pool(spares, 400 - hosts - spares, 900, "shrink" if shrinks else "wait", 8, hosts // 2, 300),
    )


# What the real decision function made of the same year: docs/benchmarks/run.md, seed 1.
LAYOUTS = {
    "400 wait": (400, 0, False, 0.0365),
    "400 shrink": (400, 0, True, 0.9576),
    "384 cold": (384, 0, False, 0.8486),
    "384+16": (384, 16, False, 0.8542),
    "368+32": (368, 32, False, 0.9960),
    "368+32 shrink": (368, 32, True, 0.9965),
}


@pytest.mark.campaign(but=("384+16",))
@has_year
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recorded_year_lies_where_years_drawn_by_blocks_do(name: str) -> None:
    hosts, spares, shrinks, by_driver = LAYOUTS[name]
    scenario, faults = layout(hosts, spares, shrinks), read_trace(YEAR)
    recorded = simulate_histories(scenario, [replay(faults, 4, seed=1)]).ettr
    drawn = simulate_histories(scenario, [by_blocks(faults, 60, seed=1)]).ettr
    assert drawn.least <= recorded.mean <= drawn.most
    assert recorded.mean == pytest.approx(by_driver, abs=0.015)


@has_year
@pytest.mark.slow
def test_rates_alone_forget_that_faults_come_together() -> None:
    """Memoryless failures at the year's rates: right where spares last, far too good where they do not."""
    enough, too_few = layout(368, 32, False), layout(384, 16, False)
    recorded = {n: simulate_histories(s, [replay(read_trace(YEAR), 4)]).ettr for n, s in enumerate((enough, too_few))}
    first, second = simulate(enough, 30, seed=1).ettr, simulate(too_few, 30, seed=1).ettr
    assert first.least <= recorded[0].mean <= first.most
    assert second.least > recorded[1].mean + 0.05


@has_year
def test_the_file_of_rates_is_the_year() -> None:
    rates, loaded = rates_of(read_trace(YEAR)), load_failures("infinitehbd")
    for effect in ("stops", "slow", "taken out"):
        assert loaded.per_host_day(effect) == pytest.approx(rates.per_host_day(effect), rel=1e-3)

    def away(failures: Any) -> float:
        return sum(c.per_host_day * c.repair.mean_s for c in failures.classes)

    assert away(loaded) == pytest.approx(away(rates), rel=1e-3)
    assert loaded.per_host_day() * 400 * failure_trace.DAYS == pytest.approx(584, rel=1e-3)


def test_a_recorded_year_can_be_watched_for_less() -> None:
    scenario = FailureScenario(Work(2, days=2), rates_of(FAULTS, 5, 10), Recovery(0, 0), Checkpoints(600, 0), Pool(3))
    assert simulate_histories(replace(scenario), [replay(FAULTS, 20, nodes=5)]).counts["hosts lost"].most <= 2
