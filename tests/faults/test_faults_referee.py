"""The referee: a table of what was observed and what is to be said of it; and the campaign's folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phalanx.core.errors import UserError
from phalanx.faults.campaign import generate
from phalanx.faults.case_manifest import Expected, Incident, Manifest, Place, Response, When
from phalanx.faults.fault_schedule import Record
from phalanx.faults.referee import Fact, Result, Results, Score, facts_of, judge, lost_steps, summary

STEPS = 10
TRUTH = {step: (1.0 / step).hex() for step in range(1, STEPS + 1)}

RESTART = Expected(responses=(Response(action="restart"),), blame_ranks=(3,))
EVICT = Expected(responses=(Response(action="evict", hosts=(1,)),), blame_ranks=(3,), blame_hosts=(1,))
STOP = Expected(responses=(Response(action="restart"), Response(action="stop")), goes_on=False, same_layout=False)
NOTHING = Expected()
AGAIN = Expected(responses=(Response(action="restart"),) * 2, blame_ranks=(3,))


def case(expected: Expected, *more: When) -> Manifest:
    place = Place(what="ranks", numbers=(3,))
    incidents = tuple(Incident(kind="exit", place=place, when=when) for when in (When(step=5), *more))
    return Manifest(id="001-exit", seed=1, steps=STEPS, incidents=incidents, expected=expected)


def steps(first: int, last: int, attempt: int, at_s: float, every_s: float = 1.0) -> list[Fact]:
    """Progress and losses."""
    facts = []
    for number, step in enumerate(range(first, last + 1)):
        then_s = at_s + number * every_s
        facts.append(Fact(then_s, "progress", attempt=attempt, step=step))
        facts.append(Fact(then_s, "loss", attempt=attempt, step=step, loss=TRUTH[step]))
    return facts


def fact(at_s: float, what: Any, **fields: Any) -> Fact:
    return Fact(at_s, what, **fields)


HAPPENED = fact(5.0, "happened", incident=0, attempt=1, step=5)
DETECTED = fact(5.25, "detected")
BLAMED = fact(5.5, "blamed", ranks=[3])
ACTED = fact(5.75, "acted", action="restart")
ENDED = fact(20.0, "ended", status=0, step=STEPS)
GOOD = [*steps(1, 5, 1, 1.0), HAPPENED, DETECTED, BLAMED, ACTED, *steps(4, 10, 2, 6.5), ENDED]
QUIET = [*steps(1, 10, 1, 1.0), HAPPENED, ENDED]


def without(facts: Sequence[Fact], *gone: Fact) -> list[Fact]:
    return [one for one in facts if one not in gone]


@dataclass(frozen=True)
class Row:
    name: str
    expected: Expected
    facts: list[Fact]
    problems: list[str]
    fields: dict[str, Any]


TABLE = [
    Row(
        "all is right",
        RESTART,
        GOOD,
        [],
        {
            "outcome": "right",
            "detect_s": 0.25,
            "localise_s": 0.5,
            "resume_s": 1.5,
            "lost_steps": 2,
            "losses_equal": True,
        },
    ),
    Row("in any order", RESTART, GOOD[::-1], [], {"outcome": "right", "resume_s": 1.5, "lost_steps": 2}),
    Row("nothing had to be done", NOTHING, QUIET, [], {"outcome": "right", "detect_s": None, "resume_s": None}),
    Row(
        "something is done without need",
        NOTHING,
        [*QUIET, DETECTED, ACTED],
        ["1 false alarms", "did restart; right is nothing"],
        {"outcome": "wrong", "false_alarms": 1},
    ),
    Row(
        "noticed before it happened",
        RESTART,
        [*GOOD, fact(3.0, "detected")],
        ["1 false alarms"],
        {"false_alarms": 1, "detect_s": 0.25},
    ),
    Row(
        "noticed by nobody",
        RESTART,
        without(GOOD, DETECTED),
        ["nothing was noticed"],
        {"detect_s": None, "outcome": "wrong"},
    ),
    Row(
        "somebody else is blamed too",
        RESTART,
        [*GOOD, fact(5.6, "blamed", ranks=[4], hosts=[2])],
        ["blamed wrongly: h2, r4"],
        {"extra_blame": ["h2", "r4"], "localise_s": 0.5},
    ),
    Row("nobody is blamed", RESTART, without(GOOD, BLAMED), ["not blamed: r3"], {"localise_s": None}),
    Row(
        "the wrong host is evicted",
        RESTART,
        [*without(GOOD, ACTED), fact(5.75, "acted", action="evict", hosts=[2])],
        ["did evict h2; right is restart"],
        {"wrong_evictions": [2]},
    ),
    Row(
        "the right host is evicted",
        EVICT,
        [*without(GOOD, ACTED), fact(5.75, "acted", action="evict", hosts=[1]), fact(5.6, "blamed", hosts=[1])],
        [],
        {"outcome": "right", "wrong_evictions": [], "localise_s": pytest.approx(0.6)},
    ),
    Row("one restart too few", AGAIN, GOOD, ["did restart; right is restart, restart"], {}),
    Row(
        "it stops, as is right",
        STOP,
        [
            *steps(1, 5, 1, 1.0),
            HAPPENED,
            DETECTED,
            ACTED,
            fact(9.0, "acted", action="stop"),
            fact(9.5, "ended", status=1),
        ],
        [],
        {"outcome": "right", "losses_equal": None, "localise_s": None},
    ),
    Row(
        "it goes on where it should stop",
        STOP,
        [*without(GOOD, BLAMED), fact(9.0, "acted", action="stop")],
        ["training reached its end, which is not right"],
        {},
    ),
    Row(
        "it does not reach its end",
        RESTART,
        [*without(GOOD, ENDED), fact(20.0, "ended", status=4, step=9)],
        ["training ended with status 4 after step 9; right is step 10"],
        {},
    ),
    Row("it never ends", RESTART, without(GOOD, ENDED), ["training did not end; right is step 10"], {}),
    Row(
        "one bit of a loss is wrong",
        RESTART,
        [*GOOD, fact(9.0, "loss", step=7, loss="0x1.2492492492493p-3")],
        [f"1 losses differ, the first at step 7: 0x1.2492492492493p-3, undisturbed {TRUTH[7]}"],
        {"losses_equal": False},
    ),
    Row(
        "a loss is missing",
        RESTART,
        [one for one in GOOD if (one.what, one.step) != ("loss", 8)],
        ["the losses of 1 steps are not known, the first is 8"],
        {"losses_equal": False},
    ),
    Row(
        "processes are left",
        RESTART,
        [*GOOD, fact(21.0, "left", pids=[7, 8]), fact(22.0, "left", pids=[8])],
        ["2 processes were left behind"],
        {"orphans": 2},
    ),
    Row(
        "the fault did not happen",
        RESTART,
        without(GOOD, HAPPENED),
        ["incident 0 (exit) did not happen", "1 false alarms"],
        {"outcome": "void", "detect_s": None},
    ),
    Row(
        "the fault was refused",
        NOTHING,
        [*without(QUIET, HAPPENED), fact(5.0, "refused", incident=0, text="no limit")],
        ["incident 0 (exit) did not happen: no limit"],
        {"outcome": "void"},
    ),
    Row(
        "training ends before the fault",
        RESTART,
        [*steps(1, 3, 1, 1.0), DETECTED, BLAMED, ACTED, fact(9.0, "ended", status=4, step=3)],
        [
            "incident 0 (exit) did not happen",
            "1 false alarms",
            "training ended with status 4 after step 3; right is step 10",
            "the losses of 7 steps are not known, the first is 4",
        ],
        {"outcome": "wrong"},
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_judgements(row: Row) -> None:
    score = judge(case(row.expected), row.facts, TRUTH)
    assert score.problems == row.problems
    assert {name: getattr(score, name) for name in row.fields} == row.fields


def test_resuming_counts_from_the_last_incident() -> None:
    manifest = case(AGAIN, When(phase="recovery", attempt=2))
    facts = [
        *steps(1, 5, 1, 1.0),
        HAPPENED,
        DETECTED,
        BLAMED,
        ACTED,
        fact(6.0, "happened", incident=1, attempt=2),
        fact(6.5, "acted", action="restart"),
        *steps(5, 10, 3, 8.0),
        ENDED,
    ]
    score = judge(manifest, facts, TRUTH)
    assert (score.problems, score.resume_s, score.lost_steps) == ([], 2.0, 1)


def test_machines_that_are_evicted_one_by_one_are_evicted_together() -> None:
    both = Expected(responses=(Response(action="evict", hosts=(1, 2)),), blame_hosts=(1, 2))
    evicted = [fact(5.6 + host / 10, "acted", action="evict", hosts=[host]) for host in (2, 1)]
    facts = [*without(GOOD, ACTED, BLAMED), *evicted, fact(5.5, "blamed", hosts=[1, 2])]
    assert judge(case(both), facts, TRUTH).problems == []


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=30))
def test_lost_steps_are_never_negative_nor_more_than_were_done(pairs: list[tuple[int, int]]) -> None:
    done = [Fact(float(n), "progress", attempt=attempt, step=step) for n, (attempt, step) in enumerate(sorted(pairs))]
    attempts = len({attempt for attempt, _ in pairs})
    assert 0 <= lost_steps(done) <= 30 * max(attempts - 1, 0)


def test_the_score_does_not_depend_on_who_looks_twice() -> None:
    doubled = [one for one in GOOD for _ in range(2 if one.what != "acted" else 1)]
    assert judge(case(RESTART), doubled, TRUTH).outcome == "right"


def test_records_of_workers_become_facts() -> None:
    records = [
        Record(0, "exit", 3, 1, 5, "a", 77, 10, 2_500_000_000),
        Record(1, "sleep", 2, 1, 5, "a", 78, 10, 3_000_000_000, "no"),
    ]
    assert facts_of(records) == [
        Fact(2.5, "happened", incident=0, attempt=1, step=5, ranks=[3]),
        Fact(3.0, "refused", incident=1, attempt=1, step=5, ranks=[2], text="no"),
    ]


def result_of(manifest: Manifest, facts: list[Fact]) -> Result:
    return Result(judge(manifest, facts, TRUTH), facts)


def test_results_are_kept_and_found(tmp_path: Path) -> None:
    results, manifest = Results(tmp_path / "new"), case(RESTART)
    assert results.find(manifest) is None
    kept = result_of(manifest, GOOD)
    assert results.keep(kept).name == "001-exit.json"
    assert results.find(manifest) == kept
    again = results.find(manifest)
    assert again is not None
    assert judge(manifest, again.facts, TRUTH) == kept.score
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["001-exit.json"]


def test_what_is_pending(tmp_path: Path) -> None:
    results, cases = Results(tmp_path), generate(3)[:3]
    for number, outcome in enumerate(("right", "void")):
        score = judge(cases[number], [], {})
        fields: dict[str, Any] = {name: getattr(score, name) for name in Score.__struct_fields__} | {"outcome": outcome}
        results.keep(Result(Score(**fields), []))
    assert results.pending(cases) == cases[1:]
    changed = cases[0].model_copy(update={"steps": 61})
    assert results.pending([changed]) == [changed]


def test_a_result_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "001-exit.json").write_text("{}")
    with pytest.raises(UserError, match="delete it"):
        Results(tmp_path).find(case(RESTART))


def test_the_summary_counts_and_takes_medians(tmp_path: Path) -> None:
    results = Results(tmp_path)
    cases = [case(RESTART).model_copy(update={"id": f"00{number}-exit--rank-{number}"}) for number in (1, 2, 3)]
    cases.append(case(RESTART).model_copy(update={"id": "004-abort--rank-0"}))
    late = [msgspec.structs.replace(one, at_s=5.75) if one == DETECTED else one for one in GOOD]
    for manifest, facts in zip(cases, (GOOD, late, [*GOOD, fact(30.0, "left", pids=[1])]), strict=False):
        results.keep(result_of(manifest, facts))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(cases, results))
    lines = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines() if "│" in line]
    rows = {cells[1]: cells[2:-1] for cells in lines}
    assert rows["exit"] == ["3", "2", "0", "0.50", "0.50", "1.50", "2", "0", "0", "1"]
    assert rows["abort"] == ["1", "0", "0", "–", "–", "–", "–", "0", "0", "0"]
    assert rows["all"][:3] == ["4", "2", "0"]
