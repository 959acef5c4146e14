"""What happened to a job: its attempts, what each fault cost, and how much of its time trained.

A job of `phalanx run` has incident reports, which say how long each phase of a recovery took and which steps were lost;
its driver knows how long attempts made steps. A run without a driver has only its spans: attempts one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.run.incidents.incident_pages import listed, load
from phalanx.run.incidents.report import Incident, Took
from phalanx.telemetry import run_tables
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.rank_states import newest_step

_ATTEMPTS = """
select attempt, min(end_ns - step_ns) / 1e9 as start_s, max(end_ns) / 1e9 as end_s,
    min(step) as first_step, max(step) as last_step, count(distinct step) as steps
from all_steps where step_ns > 0 group by attempt order by attempt
"""

_STALLS = """
with each as (
    select attempt, step, min(end_ns - step_ns) as start_ns, max(end_ns) as end_ns
    from all_steps where step_ns > 0 group by attempt, step
), placed as (
    select *, end_ns - start_ns as step_ns, lag(end_ns) over (partition by attempt order by step) as before_ns,
        median(end_ns - start_ns) over (partition by attempt) as usual_ns
    from each
)
select attempt, step, before_ns / 1e9 as from_s, end_ns / 1e9 as to_s, (end_ns - before_ns - usual_ns) / 1e9 as stall_s,
    step_ns > greatest($times * usual_ns, $least_ns) as is_long
from placed where end_ns - before_ns > greatest($times * usual_ns, $noted_ns) order by from_s
"""
_STALL_TIMES, _STALL_S, _NOTED_STALL_S = 10.0, 10.0, 1.0
"""A step of ten usual ones is a stall from so many seconds on; where somebody noted one, also what is shorter, and what
lies between two steps, where an evaluation or a checkpoint may take as long."""

_MOST_REPORTS = 200
_MOST_NOTED = 200
_STEPS = 20

_CAUSES = {
    "detect": "detection",
    "evidence": "detection",
    "stop": "restart",
    "check": "restart",
    "open the store": "restart",
    "start": "restart",
    "first step": "restart",
    "wait for hosts": "waiting for hosts",
    "going on": "made again",
}
"""Phases of a recovery as reports name them, and what losses they are (`phalanx.figures.style.LOSS_COLORS`)."""


@dataclass(frozen=True)
class History:
    """For `phalanx.figures.recovery_history`.

    Attributes:
        attempts: `attempt, start_s, end_s, first_step, last_step`.
        incidents: `at_s, what, detect_s, restart_s, again_s, lost_steps`; of reports of a driver `number, result`; of
            stalls `step`, that they came after, and `stall_s`.
        parts: `run, part, seconds`: what the job's time went on.
    """

    attempts: tuple[Mapping[str, Any], ...]
    incidents: tuple[Mapping[str, Any], ...]
    parts: tuple[Mapping[str, Any], ...]


def attempts_of(trace: Trace) -> list[dict[str, Any]]:
    """Attempts by the spans of their steps, in order."""
    return run_tables.connect(trace.folder, None, None, None, ("steps",)).sql(_ATTEMPTS).to_arrow_table().to_pylist()  # type: ignore[no-any-return]


def stalls_of(trace: Trace) -> list[dict[str, Any]]:
    """Steps that took far longer than usual, but for the first of an attempt: `attempt, step, from_s, to_s` (Unix),
    `stall_s`; `is_long`: by themselves, else only if somebody noted that nothing went on."""
    numbers = {"times": _STALL_TIMES, "least_ns": _STALL_S * 1e9, "noted_ns": _NOTED_STALL_S * 1e9}
    connection = run_tables.connect(trace.folder, None, None, None, ("steps",))
    return connection.sql(_STALLS, params=numbers).to_arrow_table().to_pylist()  # type: ignore[no-any-return]


def reports_of(folder: Path) -> list[Incident]:
    """The newest reports of a job's driver in its folder, the oldest first; damaged ones are left out."""
    return [load(folder, one.number) for one in listed(folder)[-_MOST_REPORTS:] if one.result != "unreadable"]


def history_in(folder: Path) -> History | None:
    """What the reports in a job's folder tell, beside the spans of its steps; None: there are no reports."""
    reports = reports_of(folder)
    if not reports:
        return None
    try:
        trace = Trace.open(folder)
        attempts = attempts_of(trace)
        newest = newest_step(trace)
        times = trace.step_times((newest or 0) - _STEPS, None)["median_s"].to_pylist()
    except UserError:  # a script of somebody else, which records none
        attempts, times = [], []
    return history_of(folder.name, attempts, reports, sorted(times)[len(times) // 2] if times else None)


def history_of(
    name: str,
    attempts: Sequence[Mapping[str, Any]],
    incidents: Sequence[Incident],
    step_s: float | None,
    *,
    stalls: Sequence[Mapping[str, Any]] = (),
    noted: Sequence[Mapping[str, Any]] = (),
    trained_s: float | None = None,
    whole_s: float | None = None,
) -> History:
    """Attempts and incidents of one job.

    Args:
        attempts: of `attempts_of`; empty: no spans were recorded.
        incidents: reports of its driver; empty: it has none.
        step_s: median of a step, which says how long lost steps take to make again; None: not known.
        stalls: of `stalls_of`; they and what was `noted` count where no driver reports.
        noted: incidents in the telemetry: ``at_ns, kind, step, rank``.
        trained_s, whole_s: how long attempts made steps, and since the job began, by its driver; None: not known.
    """
    rows = [_row(incident, step_s) for incident in incidents]
    if not rows:
        rows = _with_noted([*_between(attempts, step_s), *_stalled(stalls, noted)], noted)
    return History(
        tuple(attempts),
        tuple(rows),
        tuple(_parts(name, attempts, rows, trained_s, whole_s)),
    )


def _row(incident: Incident, step_s: float | None) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for fact in incident.facts:
        if isinstance(fact, Took):
            cause = _CAUSES.get(fact.phase, "restart")
            phases[cause] = phases.get(cause, 0.0) + fact.seconds
    lost = incident.lost_steps
    restart_s = sum(phases.get(name, 0.0) for name in ("restart", "waiting for hosts"))
    return {
        "at_s": incident.began_unix_s,
        "what": incident.title.replace("<", "&lt;"),  # figures take texts for markup
        "detect_s": phases.get("detection"),
        "restart_s": restart_s or None,
        "again_s": lost * step_s if step_s is not None and lost is not None else None,
        "lost_steps": lost,
        "waiting_s": phases.get("waiting for hosts", 0.0),
        "number": incident.number,
        "result": incident.outcome.result if incident.outcome else "open",
    }


def _between(attempts: Sequence[Mapping[str, Any]], step_s: float | None) -> list[dict[str, Any]]:
    """What each start over cost, where only spans tell."""
    rows = []
    for before, after in pairwise(attempts):
        lost = max(0, before["last_step"] - after["first_step"] + 1)
        rows.append(
            {
                "at_s": before["end_s"],
                "what": f"attempt {before['attempt']} ended at step {before['last_step']}",
                "detect_s": None,
                "restart_s": max(0.0, after["start_s"] - before["end_s"]),
                "again_s": lost * step_s if step_s is not None else None,
                "lost_steps": lost,
                "waiting_s": 0.0,
                "until_s": after["start_s"],
            }
        )
    return rows


def _stalled(stalls: Sequence[Mapping[str, Any]], noted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each time without a step cost, that was very long or that somebody noted."""
    rows = []
    for stall in stalls:
        seen_s = [one["at_ns"] / 1e9 for one in noted if stall["from_s"] <= one["at_ns"] / 1e9 <= stall["to_s"]]
        if not stall["is_long"] and not any(
            one["kind"] == "stall" and stall["from_s"] <= one["at_ns"] / 1e9 <= stall["to_s"] for one in noted
        ):
            continue
        detect_s = min(min(seen_s) - stall["from_s"], stall["stall_s"]) if seen_s else None
        rows.append(
            {
                "at_s": stall["from_s"],
                "what": f"no step for {stall['stall_s']:.3g} s before step {stall['step']} ended",
                "detect_s": detect_s,
                "restart_s": stall["stall_s"] - (detect_s or 0.0),
                "again_s": None,
                "lost_steps": 0,
                "waiting_s": 0.0,
                "stall_s": stall["stall_s"],
                "step": stall["step"] - 1,
                "until_s": stall["to_s"],
            }
        )
    return rows


def _with_noted(rows: list[dict[str, Any]], noted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Also what was noted while none of these went on, at no known cost; in the order of time."""
    alone = [
        {
            "at_s": one["at_ns"] / 1e9,
            "what": one["kind"].replace("<", "&lt;") + (f" {one['rank']}" if one["rank"] is not None else ""),
            "detect_s": None,
            "restart_s": None,
            "again_s": None,
            "lost_steps": 0,
            "waiting_s": 0.0,
            **({"step": one["step"]} if one["step"] is not None else {}),
        }
        for one in noted
        if not any(row["at_s"] <= one["at_ns"] / 1e9 <= row["until_s"] for row in rows)
    ]
    return sorted([*rows, *alone[-_MOST_NOTED:]], key=lambda row: float(row["at_s"]))


def _parts(
    name: str,
    attempts: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    trained_s: float | None,
    whole_s: float | None,
) -> list[dict[str, Any]]:
    again_s = sum(row["again_s"] or 0.0 for row in rows)
    ended = [row for row in rows if "stall_s" not in row]
    causes = {
        "detection": sum(row["detect_s"] or 0.0 for row in ended),
        "restart": sum((row["restart_s"] or 0.0) - row["waiting_s"] for row in ended),
        "waiting for hosts": sum(row["waiting_s"] for row in ended),
    }
    if trained_s is None:
        trained_s = sum(row["end_s"] - row["start_s"] for row in attempts)
    stalled_s = min(sum(row.get("stall_s", 0.0) for row in rows), trained_s)
    trained_s -= stalled_s
    training_s = max(0.0, trained_s - again_s)
    parts = {"training": training_s, "made again": min(again_s, trained_s), "stalled": stalled_s, **causes}
    if whole_s is not None:
        # What no report names: the first start, and the end.
        parts["queue"] = max(0.0, whole_s - sum(parts.values()))
    return [{"run": name, "part": part, "seconds": seconds} for part, seconds in parts.items() if seconds > 0]
