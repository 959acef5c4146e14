"""How well a case was handled: a pure function of its manifest, of dated facts, and of the undisturbed losses.

Right is exact: whatever is blamed besides the guilty is an error, and so is an action too many. A campaign's folder has
a JSON file per case, so that it can be interrupted and resumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.faults.campaign import family_of
from phalanx.faults.case_manifest import Manifest
from phalanx.faults.fault_schedule import Record

What = Literal["happened", "refused", "detected", "blamed", "acted", "progress", "loss", "ended", "left"]


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One observation; which fields count depends on `what`.

    ========  ==========================================================================================
    happened  an incident has taken place, by its own record or the controller's check: incident, attempt
    refused   it has not, and why: incident, text
    detected  the supervisor has noticed that something is wrong and acts, or would, on it
    blamed    it has named these: ranks, hosts
    acted     one per recovery, the strongest of what it did: action (restart, evict …), hosts
    progress  the first rank has reported the end of an optimizer step: attempt, step
    loss      of a step, as ``float.hex`` has it: attempt, step, loss
    ended     the job is over: status, step (the last one done)
    left      processes that are still there afterwards: pids
    ========  ==========================================================================================

    Attributes:
        at_s: of the campaign machine's monotonic clock.
    """

    at_s: float
    what: What
    incident: int = -1
    attempt: int = 0
    step: int = -1
    ranks: list[int] = []
    hosts: list[int] = []
    action: str = ""
    loss: str = ""
    status: int = 0
    pids: list[int] = []
    text: str = ""


def facts_of(records: Iterable[Record]) -> list[Fact]:
    """What workers have put on record of what they did to themselves (on the campaign's own machine)."""
    return [
        Fact(
            at_s=record.monotonic_ns / 1e9,
            what="refused" if record.refused else "happened",
            incident=record.number,
            attempt=record.attempt,
            step=record.step,
            ranks=[record.rank],
            text=record.refused,
        )
        for record in records
    ]


CaseOutcome = Literal["right", "wrong", "void"]
Step = tuple[str, frozenset[int]]


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The judgement of one case.

    Attributes:
        digest: of the manifest that it belongs to.
        outcome: void: what should have gone wrong did not, though its moment came, so that nothing follows.
        problems: all that was not right, in words.
        detect_s: from the first incident until something was noticed; None: nothing was.
        localise_s: from the first incident until all that are to blame were named; None: nobody is, or not all were.
        resume_s: from the last incident until the end of the first step of a later attempt; None: there was none.
        lost_steps: done again.
        false_alarms: noticed before anything had happened, or where nothing had to be done.
        extra_blame: ranks (``r3``) and machines (``h1``) that were named wrongly.
        wrong_evictions: machines.
        losses_equal: bit by bit with those of the undisturbed run; None: that is not expected.
        orphans: processes left behind.
    """

    id: str
    digest: str
    outcome: CaseOutcome
    problems: list[str]
    detect_s: float | None
    localise_s: float | None
    resume_s: float | None
    lost_steps: int
    false_alarms: int
    extra_blame: list[str]
    wrong_evictions: list[int]
    losses_equal: bool | None
    orphans: int


def judge(manifest: Manifest, facts: Iterable[Fact], undisturbed: Mapping[int, str]) -> Score:
    """The score of a case.

    Args:
        facts: in any order.
        undisturbed: the loss of every step of the same training without a fault, as ``float.hex`` has it.
    """
    dated = sorted(facts, key=lambda fact: fact.at_s)
    missing = _not_happened(manifest, dated)
    # Void: training came to where an incident should have happened, or it was refused, which is nobody else's doing.
    is_void = any(
        (fact.what == "refused" and fact.incident == number)
        or (fact.what == "progress" and fact.attempt >= when.attempt and fact.step >= when.step)
        for number, when in ((number, manifest.incidents[number].when) for number in missing)
        for fact in dated
    )
    happened = [fact for fact in dated if fact.what == "happened"]
    first_s = happened[0].at_s if happened else float("inf")
    expected = manifest.expected
    guilty = {f"r{rank}" for rank in expected.blame_ranks} | {f"h{host}" for host in expected.blame_hosts}
    named = _blamed(dated)
    extra, missed = sorted(named - guilty), sorted(guilty - named)
    detected = [fact for fact in dated if fact.what == "detected"]
    alarms = len([fact for fact in detected if fact.at_s < first_s or not expected.responses])
    wanted = _steps((response.action, response.hosts) for response in expected.responses)
    done = _steps((fact.action, fact.hosts) for fact in dated if fact.what == "acted")
    allowed = {host for response in expected.responses for host in response.hosts}
    evicted = {host for fact in dated if fact.what == "acted" and fact.action == "evict" for host in fact.hosts}
    loss_problem = _judge_losses(manifest, dated, undisturbed)
    orphans = len({pid for fact in dated if fact.what == "left" for pid in fact.pids})
    problems = [
        *missing.values(),
        *([f"{alarms} false alarms"] if alarms else []),
        *(["nothing was noticed"] if expected.responses and not detected else []),
        *([f"blamed wrongly: {', '.join(extra)}"] if extra else []),
        *([f"not blamed: {', '.join(missed)}"] if missed else []),
        *([f"did {_shown(done)}; right is {_shown(wanted)}"] if wanted != done else []),
        *_judge_end(manifest, dated),
        *loss_problem,
        *([f"{orphans} processes were left behind"] if orphans else []),
    ]
    return Score(
        id=manifest.id,
        digest=manifest.digest(),
        outcome="void" if is_void else "wrong" if problems else "right",
        problems=problems,
        detect_s=_after(first_s, (fact.at_s for fact in detected)),
        localise_s=_localised_s(guilty, dated, first_s),
        resume_s=_resumed_s(dated, happened),
        lost_steps=lost_steps(dated),
        false_alarms=alarms,
        extra_blame=extra,
        wrong_evictions=sorted(evicted - allowed),
        losses_equal=not loss_problem if expected.goes_on and expected.same_layout else None,
        orphans=orphans,
    )


def lost_steps(facts: Sequence[Fact]) -> int:
    """Steps that later attempts did again."""
    lost, best = 0, 0
    begun: set[int] = set()
    for fact in facts:
        if fact.what != "progress":
            continue
        if fact.attempt not in begun:
            begun.add(fact.attempt)
            lost += max(best - fact.step + 1, 0) if best else 0
        best = max(best, fact.step)
    return lost


def _not_happened(manifest: Manifest, facts: Sequence[Fact]) -> dict[int, str]:
    """Incidents that did not take place, in words."""
    happened = {fact.incident for fact in facts if fact.what == "happened"}
    reasons = {fact.incident: fact.text for fact in facts if fact.what == "refused"}
    return {
        number: f"incident {number} ({incident.kind}) did not happen"
        + (f": {reasons[number]}" if number in reasons else "")
        for number, incident in enumerate(manifest.incidents)
        if number not in happened
    }


def _blamed(facts: Iterable[Fact]) -> set[str]:
    named: set[str] = set()
    for fact in facts:
        if fact.what == "blamed":
            named |= {f"r{rank}" for rank in fact.ranks} | {f"h{host}" for host in fact.hosts}
    return named


def _localised_s(wanted: set[str], facts: Sequence[Fact], first_s: float) -> float | None:
    named = set[str]()
    for fact in facts:
        named |= _blamed([fact])
        if wanted and fact.at_s >= first_s and wanted <= named:
            return fact.at_s - first_s
    return None


def _steps(actions: Iterable[tuple[str, Sequence[int]]]) -> list[Step]:
    """Actions in order; machines that are evicted one after the other count as evicted together."""
    steps: list[Step] = []
    for name, hosts in actions:
        if name == "evict" and steps and steps[-1][0] == "evict":
            steps[-1] = name, steps[-1][1] | frozenset(hosts)
        else:
            steps.append((name, frozenset(hosts) if name == "evict" else frozenset()))
    return steps


def _shown(steps: Sequence[Step]) -> str:
    return ", ".join(" ".join([name, *(f"h{host}" for host in sorted(hosts))]) for name, hosts in steps) or "nothing"


def _judge_end(manifest: Manifest, facts: Sequence[Fact]) -> list[str]:
    ends = [fact for fact in facts if fact.what == "ended"]
    finished = any(fact.status == 0 and fact.step >= manifest.steps for fact in ends)
    if finished == manifest.expected.goes_on:
        return []
    if finished:
        return ["training reached its end, which is not right"]
    how = f"ended with status {ends[-1].status} after step {ends[-1].step}" if ends else "did not end"
    return [f"training {how}; right is step {manifest.steps}"]


def _judge_losses(manifest: Manifest, facts: Sequence[Fact], undisturbed: Mapping[int, str]) -> list[str]:
    if not (manifest.expected.goes_on and manifest.expected.same_layout):
        return []
    losses = [fact for fact in facts if fact.what == "loss"]
    differ = [fact for fact in losses if undisturbed.get(fact.step) != fact.loss]
    if differ:
        one = differ[0]
        truth = undisturbed.get(one.step, "not known")
        return [f"{len(differ)} losses differ, the first at step {one.step}: {one.loss}, undisturbed {truth}"]
    absent = set(range(1, manifest.steps + 1)) - {fact.step for fact in losses}
    return [f"the losses of {len(absent)} steps are not known, the first is {min(absent)}"] if absent else []


def _resumed_s(facts: Sequence[Fact], happened: Sequence[Fact]) -> float | None:
    if not happened:
        return None
    last = happened[-1]
    before = [fact.attempt for fact in facts if fact.what == "progress" and fact.at_s <= last.at_s]
    attempt = last.attempt or max(before, default=0)
    later = (fact.at_s for fact in facts if fact.what == "progress" and fact.attempt > attempt)
    return _after(last.at_s, later)


def _after(begin_s: float, times_s: Iterable[float]) -> float | None:
    """Seconds until the first of these that is not earlier."""
    return next((at_s - begin_s for at_s in times_s if at_s >= begin_s), None)


_COLUMNS = (
    "family",
    "cases",
    "right",
    "void",
    "detect s",
    "localise s",
    "resume s",
    "lost steps",
    "false alarms",
    "evicted wrongly",
    "orphans",
)


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a case: enough to judge it again."""

    score: Score
    facts: list[Fact]


class Results:
    """The results in a folder.

    Args:
        folder: made when the first one is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, result: Result) -> Path:
        """Write a result, all at once, over an earlier one of the same case; returns its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{result.score.id}.json"
        write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        return path

    def find(self, case: Manifest) -> Result | None:
        """The result of this very case; None: there is none, or the case has changed since.

        Raises:
            UserError: its file cannot be read.
        """
        path = self.folder / f"{case.id}.json"
        if not path.exists():
            return None
        try:
            result = msgspec.json.decode(path.read_bytes(), type=Result)
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"is no result ({error})", cure="delete it", value=str(path)) from None
        return result if result.score.digest == case.digest() else None

    def pending(self, cases: Iterable[Manifest]) -> list[Manifest]:
        """Those still to be run: without a result, or with one that says nothing."""
        return [case for case in cases if (found := self.find(case)) is None or found.score.outcome == "void"]


def summary(cases: Sequence[Manifest], results: Results) -> Table:
    """One line per family of cases, medians over those that are right, and a line for all."""
    table = Table(*_COLUMNS, title="fault campaign")
    families = list(dict.fromkeys(family_of(case) for case in cases))
    for family in families:
        members = [case for case in cases if family_of(case) == family]
        table.add_row(family, *_cells(members, results))
    table.add_section()
    table.add_row("all", *_cells(cases, results), style="bold")
    return table


def _cells(cases: Sequence[Manifest], results: Results) -> list[str]:
    scores = [found.score for case in cases if (found := results.find(case)) is not None]
    right = [score for score in scores if score.outcome == "right"]
    void = sum(score.outcome == "void" for score in scores)
    return [
        str(len(cases)),
        str(len(right)),
        str(void),
        _median([score.detect_s for score in right]),
        _median([score.localise_s for score in right]),
        _median([score.resume_s for score in right]),
        _median([score.lost_steps for score in right], "{:.0f}"),
        str(sum(score.false_alarms for score in scores)),
        str(sum(len(score.wrong_evictions) for score in scores)),
        str(sum(score.orphans for score in scores)),
    ]


def _median(values: Iterable[float | None], form: str = "{:.2f}") -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else "–"
