"""The judge of spans beside the driver's own evidence of a hang: both agree, or the verdict says that they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_helpers import Town, running
from msgspec.structs import replace
from support.own_loop import paused_loop

from phalanx.detect.detection import Culprit, Detection, Onset
from phalanx.detect.hangs.stack_dumps import py_spy_program
from phalanx.run.config import RunConfig
from phalanx.run.decide.actions import AddToIncident, KeepDetection
from phalanx.run.decide.events import SuspectsNamed
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Host, initial
from phalanx.run.driver.judgements import beside_spans
from phalanx.run.driver.run_judges import RunJudges

GUARD_S = 280.0


def by_spans(*ranks: int, confidence: float = 0.98) -> Detection:
    who = tuple(Culprit("rank", str(rank), (rank,), ("abc"[rank // 2],)) for rank in ranks)
    sentence = f"rank {ranks[0]} never entered all-reduce 9" if ranks else "nobody can be named"
    return Detection("hang", sentence, who, Onset(40.0), confidence, ("rank 3 is in backward",), advice="check")


def named(*ranks: int, **more: Any) -> SuspectsNamed:
    event = {"at_s": 60.0, "attempt": 1, "ranks": ranks, "why": "in a lock, all others in a collective"}
    return SuspectsNamed(**(event | {"is_proven": False} | more))


@pytest.mark.parametrize(
    ("event", "found", "says"),
    [
        (named(3), by_spans(3), "so by spans: rank 3 never"),
        (named(3), by_spans(2), "but by spans: rank 2 never"),
        (named(2, 3), by_spans(3), "so by spans: rank 3 never"),
        (named(3), by_spans(2, 3), "but by spans: rank 2 never"),
        (named(group="pair", group_ranks=(2, 3)), by_spans(2), "so by spans: rank 2 never"),
        (named(), by_spans(3), "by spans: rank 3 never"),
        (named(3), by_spans(), "by spans: nobody can"),
        (named(3), None, ""),
    ],
)
def test_whether_they_agree_is_said(event: SuspectsNamed, found: Detection | None, says: str) -> None:
    told = beside_spans(event, found)
    assert told.spans_say.startswith(says) and bool(told.spans_say) == bool(says) and told.by_spans == found


@pytest.fixture(name="hung")
def hung_fixture(tmp_path: Path) -> Any:
    """A job that stands still, whose evidence is given as an event; what is told of it."""
    towns: list[Town] = []

    def tell(event: SuspectsNamed) -> tuple[Town, KeepDetection]:
        town = Town(tmp_path, ["a", "b", "c"], Job("j", hosts=3, workers_per_host=2), Policy(evidence_s=1000.0))
        towns.append(town)
        town.begin()
        town.until(running(1))
        town.go_on(10)
        for host in town.hosts.values():
            host.stalled = True
        town.until(lambda state: state.phase == "diagnosing")
        town.driver.ask(lambda at_s: replace(event, at_s=at_s))
        (kept,) = town.driver.state.detections
        return town, kept

    yield tell
    for town in towns:
        town.journal.close()


def test_agreement_makes_surer_and_the_report_has_what_spans_say(hung: Callable[..., Any]) -> None:
    town, kept = hung(beside_spans(named(3), by_spans(3)))
    assert kept.judge == "hang" and kept.found.confidence == 0.98 and kept.found.since == Onset(40.0)
    assert "so by spans: rank 3 never entered all-reduce 9" in kept.found.why
    assert kept.found.advice == "watch"  # that nothing moves proves no fault of a host, whoever says so
    notes = [(one.by, one.text) for one in town.told if isinstance(one, AddToIncident)]
    assert ("spans", "so by spans: rank 3 never entered all-reduce 9") in notes


def test_others_that_spans_name_are_told_and_leave_a_doubt(hung: Callable[..., Any]) -> None:
    _, kept = hung(beside_spans(named(3, is_proven=True), by_spans(0)))
    assert [one.ranks for one in kept.found.who] == [(3,)] and kept.found.confidence == 0.5
    assert "but by spans: rank 0 never entered all-reduce 9" in kept.found.why


def test_where_only_spans_name_a_rank_they_are_heard(hung: Callable[..., Any]) -> None:
    town, kept = hung(beside_spans(named(), by_spans(3)))
    assert [one.ranks for one in kept.found.who] == [(3,)] and kept.found.sentence.startswith("rank 3 never entered")
    assert any("nobody stands out" in why for why in kept.found.why) and kept.found.blamed_hosts == ("b",)
    assert not town.driver.state.recovery or not town.driver.state.recovery.suspects  # it is advice, and no more


@pytest.mark.skipif(py_spy_program() is None, reason="py-spy, which tells a pause from a hang, is not here")
def test_what_spans_say_of_a_pause_is_known_before_it_is_a_hang(tmp_path: Path) -> None:
    hosts = {name: Host("", "active", place=place) for place, name in enumerate("ab")}
    state = replace(
        initial(Policy(), Job("j", hosts=2, workers_per_host=2)),
        phase="running",
        attempt=1,
        placement=("a", "b"),
        hosts=hosts,
    )
    quiet = [6.0]
    standing = lambda now: SimpleNamespace(quiet_s=quiet[0], usual_s=0.05)  # noqa: E731
    attempt = SimpleNamespace(attempt=1, standing=standing)
    driver = SimpleNamespace(state=state, attempt=attempt, hosts=SimpleNamespace(hosts={}))
    settings = {"script": "train.py", "folder": str(tmp_path / "job"), "judges": {"limit_s": GUARD_S}}
    judges = RunJudges(RunConfig.model_validate(settings), driver, tmp_path / "run", tmp_path)  # type: ignore[arg-type]

    async def story() -> SuspectsNamed:
        watching = asyncio.create_task(judges._watch_pauses())
        async with asyncio.timeout(GUARD_S):
            while judges._by_spans is None:
                await asyncio.sleep(0.02)
            told = judges.weighed(named(1))
            assert judges.weighed(named(1, attempt=2)).by_spans is None
            quiet[0] = 0.1  # it goes on, and what was said of the pause is over
            while judges._by_spans is not None:
                await asyncio.sleep(0.02)
        watching.cancel()
        await asyncio.wait([watching])
        return told

    with paused_loop(tmp_path / "run", "hang", ranks=4):
        told = asyncio.run(story())
    assert told.spans_say.startswith("so by spans: rank 1 (host a, data 1) never entered all-reduce 9 of group data-0")
