"""Every phase with every event has an expected outcome: the tables of docs/run_decisions.md, which are read here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from decide_helpers import World, attempt_runs, running

from phalanx.detect.detection import Detection
from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide
from phalanx.run.decide.policy import Job
from phalanx.run.decide.state import PHASES, State, next_deadline

PAGE = Path(__file__).parents[2] / "docs" / "run_decisions.md"
KINDS = {kind.__struct_config__.tag: kind for kind in get_args(ev.Event)}
QUIET = ("AddToIncident", "OpenIncident")
"""Left out of the table: every recovery has them."""

ROUNDS = ("first round", "second round")
BETWEEN = "check-failed-between"
"""A row of its own: only the network between two hosts is bad."""


def state_in(phase: str) -> State:
    """Three hosts a, b, c with two workers each and a spare d, in this phase; rank 3 (on b) is the one that failed."""
    world = World(Job("j", 3, 2, 1))
    if phase == "waiting":  # d is there, the others are being checked
        world.run_until(lambda w: len(w.state.checks) == 4)
        world.deliver(ev.CheckPassed(world.now_s, "d", world.state.checks["d"].number))
        world.deliver(ev.CheckPassed(world.now_s, "c", world.state.checks["c"].number))
    if phase in ("diagnosing", "stopping", "checking", "ended"):
        world.run_until(running)
        world.run_for(5)
    if phase == "diagnosing":
        world.hang(3)
    elif phase in ("stopping", "checking"):
        world.kill(3, fault="host")
    elif phase == "ended":
        world.finish_work()
    world.run_until(lambda w: w.state.phase == phase)
    return world.state


def state_in_round(which: str) -> State:
    """Four hosts a to d and a spare are tested with each other; a does not reach b, and only b has not answered yet."""
    world = World(Job("j", 4, 2, 1), names_suspects=False)
    for attempt in (1, 2):
        world.run_until(attempt_runs(attempt))
        world.run_for(5)
        world.hang(3)
    world.hosts["a"].link = "timed out"
    asked = 4 if which == "first round" else 6
    world.run_until(lambda w: len([a for a in w.taken("Check") if a.peers]) == asked)  # type: ignore[attr-defined]
    state = world.state
    for name, check in list(state.checks.items()):
        if name != "b":
            asked_for = act.Check(name, check.number, check.kind, check.peers)
            state, _ = decide(state, world._checked(world.hosts[name], asked_for, state.now_s))
    return state


def sample(kind: type, state: State) -> ev.Event:
    """The usual event of this kind: of the present attempt, of host b or its rank 3; a tick comes when it is due."""
    at_s = state.now_s + 0.01
    attempt, host = state.attempt, "b"
    number = state.checks[host].number if host in state.checks else 0
    extra = {
        ev.Tick: {"at_s": next_deadline(state) or at_s},
        ev.HostJoined: {"host": host, "attempt": attempt, "running": (2, 3)},
        ev.CheckPassed: {"host": host, "number": number},
        ev.CheckFailed: {"host": host, "number": number},
        ev.SlowHost: {"attempt": attempt, "host": host, "factor": 1.5},
        ev.Detected: {"judge": "stragglers", "found": Detection("slow host", f"{host} is slow")},
        ev.StoreOpened: {"attempt": attempt, "port": 29500},
        ev.Restored: {"attempt": attempt, "step": 400},
        ev.Running: {"attempt": attempt, "step": 500, "is_absolute": True},
        ev.Advanced: {"attempt": attempt, "step": 600, "is_absolute": True},
        ev.WorkerFailed: {"attempt": attempt, "rank": 3, "kind": "signal", "summary": "killed by SIGKILL"},
        ev.LeftEarly: {"attempt": attempt, "ranks": (3,), "steps": (500,)},
        ev.NoProgress: {"attempt": attempt, "age_s": 9.0, "limit_s": 5.0},
        ev.TrafficSilent: {"attempt": attempt, "hosts": (host,), "silent_s": 70.0},
        ev.LossBroken: {"attempt": attempt, "step": 500},
        ev.SuspectsNamed: {"attempt": attempt, "ranks": (3,), "why": "silent"},
        ev.TimeShort: {"left_s": 60.0},
    }.get(kind)
    if extra is None:
        names = {field.name for field in msgspec.structs.fields(kind)}
        extra = {name: value for name, value in (("attempt", attempt), ("host", host)) if name in names}
    return kind(**{"at_s": at_s, **extra})


def outcome(phase: str, tag: str) -> str:
    """What happens, as the table says it: the next phase if it is another, and the actions; ``noted``: state only."""
    if phase in PHASES:
        before = state_in(phase)
        return outcome_of(before, sample(KINDS[tag], before))
    before = state_in_round(phase)
    if tag == BETWEEN:
        number, peer = before.checks["b"].number, before.checks["b"].peers[0]
        return outcome_of(before, ev.CheckFailed(before.now_s, "b", number, "", {peer: "timed out"}, is_between=True))
    event = sample(KINDS[tag], before)
    if isinstance(event, ev.CheckPassed):
        event = msgspec.structs.replace(event, peer_rates={before.checks["b"].peers[0]: 1e10})
    return outcome_of(before, event)


def outcome_of(before: State, event: ev.Event) -> str:
    """The same of one event."""
    after, actions = decide(before, event)
    names = [type(action).__name__ for action in actions if type(action).__name__ not in QUIET]
    words = list(dict.fromkeys(names))
    if after.phase != before.phase:
        return f"→ {after.phase}" + (f": {', '.join(words)}" if words else "")
    if words:
        return ", ".join(words)
    same = msgspec.structs.replace(after, now_s=before.now_s) == before
    return "–" if same else "noted"


def table(first: str = "waiting") -> dict[str, dict[str, str]]:
    """One of the page's, with this first column: event → phase → outcome."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(i for i, line in enumerate(lines) if line.startswith(f"| event | {first} |"))
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[head:]]
    names = rows[0][1:]
    return {
        row[0].strip("`"): dict(zip(names, row[1:], strict=True))
        for row in rows[1:]
        if re.fullmatch(r"`[a-z-]+`", row[0]) and len(row) == len(rows[0])
    }


def test_every_event_has_a_row_and_every_phase_a_column():
    assert set(table()) == set(KINDS)
    assert all(set(row) == set(PHASES) for row in table().values())
    assert set(table(ROUNDS[0])) == {*KINDS, BETWEEN}
    assert all(set(row) == set(ROUNDS) for row in table(ROUNDS[0]).values())


@pytest.mark.parametrize("phase", [*PHASES, *ROUNDS])
def test_every_event_has_its_expected_outcome_in(phase: str):
    expected = {tag: row[phase] for tag, row in table("waiting" if phase in PHASES else ROUNDS[0]).items()}
    assert {tag: outcome(phase, tag) for tag in expected} == expected


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_about_another_attempt_changes_nothing_but_time_in(phase: str):
    before = state_in(phase)
    for kind in KINDS.values():
        event = sample(kind, before)
        if hasattr(event, "attempt") and kind is not ev.HostJoined:
            for other in (before.attempt - 1, before.attempt + 1):
                stale = msgspec.structs.replace(event, attempt=other)
                after, actions = decide(before, stale)
                assert actions == [] and msgspec.structs.replace(after, now_s=before.now_s) == before


def as_markdown(columns: tuple[str, ...] = PHASES) -> str:
    """A table as it is now; to be read before it is put into the page."""
    lines = ["| event | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for tag in [*KINDS, BETWEEN] if columns == ROUNDS else KINDS:
        lines.append(f"| `{tag}` | " + " | ".join(outcome(phase, tag) for phase in columns) + " |")
    return "\n".join(lines)
