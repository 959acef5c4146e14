"""What judges find becomes one event of the job, is told once, and is acted upon only where the policy asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_helpers import Town, running

from phalanx.detect.detection import Culprit, Detection
from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.actions import AddToIncident, Alert, CloseIncident, KeepDetection, OpenIncident
from phalanx.run.decide.events import LossBroken, Noticed, SlowHost, TrafficSilent
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.verdicts import bounded, detected_of
from phalanx.run.incidents.detections_file import NAME, read_detections
from phalanx.run.incidents.evidence_files import ReportKeeper
from phalanx.run.incidents.incident_pages import load
from phalanx.run.messages import WorkerEnded
from phalanx.run.reports.terminal_text import detection_text

NAMES = ["a", "b", "c"]


def slow(host: str = "b", advice: str = "evict", slowdown: float = 1.5) -> Detection:
    who = (Culprit("host", host, (2, 3), (host,)),)
    then = (f"run `phalanx check` on {host}",)
    return Detection("slow host", f"{host} is slow", who, then=then, advice=advice, figures={"slowdown": slowdown})  # type: ignore[arg-type]


@pytest.fixture(name="make")
def make_fixture(tmp_path: Path) -> Iterator[Callable[..., Town]]:
    towns: list[Town] = []

    def make(policy: Policy | None = None, spares: int = 0) -> Town:
        names = NAMES + ["spare"] * spares
        town = Town(tmp_path, names, Job("j", hosts=3, workers_per_host=2, spares=spares), policy)
        town.begin()
        town.until(running(1))
        town.go_on(10)
        towns.append(town)
        return town

    yield make
    for town in towns:
        town.journal.close()


def test_a_judge_that_finds_the_same_again_is_heard_once_and_again_when_it_is_graver(
    make: Callable[..., Town],
) -> None:
    town = make()
    for advice in ("watch", "check", "watch", "check"):
        town.driver.keep("stragglers", slow(advice=advice))
    town.driver.keep("machines", slow(advice="check"))
    kept = [(one.judge, one.found.advice) for one in town.driver.state.detections]
    assert kept == [("stragglers", "watch"), ("stragglers", "check"), ("machines", "check")]
    assert [one.host for one in town.told if isinstance(one, Alert)] == ["b", "b", "b"]
    before = town.driver.state.detections
    town.restart()  # and the next driver knows
    town.driver.keep("stragglers", slow(advice="check"))
    assert town.driver.state.detections == before


@pytest.mark.parametrize(
    ("policy", "leaves"),
    [
        (Policy(), False),
        (Policy(replace_slow=True), True),
        (Policy(replace_slow=True, slow_factor=2.0), False),
        (Policy(replace_slow=True, advise_only=True), False),
    ],
)
def test_eviction_that_is_advised_happens_only_where_the_policy_asks_for_it(
    make: Callable[..., Town], policy: Policy, leaves: bool
) -> None:
    town = make(policy)
    town.driver.keep("machines", slow("a"))  # of another kind than the policy is about
    town.driver.keep("stragglers", slow("c", advice="check"))
    town.driver.keep("stragglers", slow("stranger"))
    town.driver.keep("stragglers", slow("b"))
    assert {name for name, host in town.driver.state.hosts.items() if host.leaves} == ({"b"} if leaves else set())
    assert len([one for one in town.told if isinstance(one, Alert)]) == 4


def test_a_faulty_machine_leaves_for_a_spare_where_the_policy_asks_for_it(make: Callable[..., Town]) -> None:
    town = make(Policy(replace_faulty=True), spares=1)
    town.driver.keep("stragglers", slow("a"))  # of another kind than the policy is about
    assert not town.driver.state.leaving
    town.driver.keep("machines", slow("b"))
    town.restart()  # and the next driver knows
    assert town.driver.state.faulty_s
    town.until(running(2))
    assert "b" not in town.driver.state.placement


def test_the_judges_of_the_driver_say_it_too_and_nobody_is_alerted_twice(make: Callable[..., Town]) -> None:
    town = make()
    for _ in range(2):
        town.driver.ask(lambda at_s: SlowHost(at_s, 1, "b", 1.4, "by its own time", 20))
    (kept,) = town.driver.state.detections
    assert kept.judge == "stragglers" and kept.found.blamed_hosts == ("b",) and kept.found.blamed_ranks == (2, 3)
    assert kept.found.since.step == 20 and kept.found.figures["slowdown"] == 1.4
    assert len([one for one in town.told if isinstance(one, Alert)]) == 2  # of the events, as ever
    town.driver.keep("stragglers", slow("b", advice="check"))  # the judge of spans agrees
    assert len(town.driver.state.detections) == 1


def test_a_hang_names_its_host_and_the_incident(make: Callable[..., Town]) -> None:
    town = make()
    town.hosts["c"].is_mute = True
    for name in "ab":
        town.hosts[name].stalled = True
    town.until(lambda state: bool(state.detections))
    (kept,) = town.driver.state.detections
    assert kept.judge == "hang" and kept.found.blamed_hosts == ("c",) and kept.found.blamed_ranks == (4, 5)
    assert kept.incident == 1 and "hold up the others: no answer" in kept.found.sentence
    assert "incident 1" in detection_text(kept)
    assert not [one for one in town.told if isinstance(one, AddToIncident) and one.by == "judge of hang"]


def test_lines_traffic_and_loss_in_the_shape_of_all_judges(make: Callable[..., Town]) -> None:
    state = make().driver.state
    line = detected_of(state, Noticed(5.0, "b", "silent-corruption", "this rank is wrong.", 3, "host", is_fatal=True))
    assert line is not None and (line.judge, line.found.blamed_hosts) == ("corruption", ("b",))
    assert detected_of(state, Noticed(5.0, "b", "nccl-timeout", "timeout", 3, "process", is_fatal=True)) is None
    some = detected_of(state, TrafficSilent(100.0, 1, ("c",), 20.0, is_total=False, without_progress=False))
    assert some is not None and some.found.blamed_hosts == () and some.found.since.unix_s == 80.0
    assert some.found.who[0].hosts == ("c",)
    every = detected_of(state, TrafficSilent(100.0, 1, ("a", "b", "c"), 20.0))
    assert every is not None and not every.found.who
    one = detected_of(state, LossBroken(9.0, 1, 40, (2,)))
    assert one is not None and one.found.blamed_hosts == ("b",)
    shared = detected_of(state, LossBroken(9.0, 1, 40))
    assert shared is not None and shared.found.advice == "program"
    assert detected_of(state, SlowHost(9.0, 1, "stranger", 2.0)) is None


def test_what_is_kept_is_bounded_and_finite() -> None:
    found = Detection("x", "y " * 2000, why=("z" * 9999,) * 50, figures={"a": math.nan, "b": math.inf, "c": 1})
    kept = bounded(found)
    assert len(kept.sentence) <= 500 and len(kept.why) <= 6 and kept.figures == {"c": 1}


def test_what_is_found_of_an_incident_that_is_over_is_added_to_its_report(tmp_path: Path) -> None:
    keeper = ReportKeeper(tmp_path, "train", ["hunter22"])
    keeper.tell(OpenIncident(1, 1, "executor of b", "rank 3 on b: exit status 1"), Now(1.0, 11.0))
    keeper.tell(CloseIncident(1, "attempt 2 makes steps", {"stopping": 0.1}), Now(2.0, 12.0))
    keeper.tell(OpenIncident(2, 2, "executor of a", "rank 0 on a: killed"), Now(3.0, 13.0))
    keeper.heard("a", WorkerEnded(2, 0, -9, "signal", "killed by SIGKILL", "its last line"), Now(3.0, 13.0))
    found = Detection("KeyError", 'KeyError of rank 3: "hunter22"', advice="program")
    kept = KeepDetection(1, 14.0, 2, "logs", found, 1)
    for _ in range(2):  # as a driver that was restarted does
        keeper.tell(kept, Now(4.0, 14.0))
        keeper.tell(AddToIncident(1, "judge of logs", found.sentence), Now(4.0, 14.0))
    keeper.tell(CloseIncident(2, "attempt 3 makes steps", {"stopping": 0.1}), Now(5.0, 15.0))
    keeper.close(30)
    first, second = load(tmp_path, 1), load(tmp_path, 2)
    assert first.outcome is not None and "attempt 2" in first.title
    assert [fact.what for fact in first.seen if fact.by == "judge of logs"] == ['KeyError of rank 3: "(hidden)"']
    assert first.evidence == [] and second.evidence == ["rank-0.txt"]
    (stored,) = read_detections(tmp_path)
    assert stored.found.what == "KeyError" and "hunter22" not in (tmp_path / NAME).read_text()
    assert isinstance(stored, actions.KeepDetection) and stored.incident == 1
