"""Histories of incidents by host: read from jobs of `phalanx run`, runs' telemetry, and tables of a site's own.

    host,unix_s,kind,job,signal
    gpu03,1764000000,GPU fallen off the bus,pretrain-7,xid

A table is CSV or JSON (a list, or an object a line); columns are known by several names (``node_id``, ``event_time`` in
days, ``start``…). Of start and end events, such as in the trace of InfiniteHBD (arXiv 2502.03885), starts count.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.detect.detection import MACHINE_ADVICE
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES, class_of
from phalanx.detect.logs.log_rules import Matcher

DAY_S = 86_400.0

SIGNALS = ("excl_jobid_count", "xid_cnt", "tickets", "out_count", "multi_node_node_fails", "single_node_node_fails")
"""Meta's signals of lemon nodes (arXiv 2410.21680, section 5) that are counts of incidents."""

_HOST = ("host", "node", "node_id", "hostname", "nodename", "instance")
_TIME = ("unix_s", "time", "timestamp", "at", "start", "start_time", "date")
_KIND = ("kind", "fault_type", "type", "what", "reason", "class", "event")
_JOB = ("job", "job_id", "jobid", "run")
_OF_PROGRAMS = ("framework", "script")
_EXCEPTION = re.compile(r"\b[A-Z][A-Za-z]{1,40}Error\b")
_CAPITAL = re.compile(r"(?<=[a-z])([A-Z])")
_NO_HISTORY = frozenset({"checkpoints", "logs", "executors", "secret", "alerts", "spans", ".git"})
_IS_STEP = re.compile(r"step[-_]?\d+$")
_MOST_BLAMED = 4  # hosts at once: more have a cause in common
_NOT_OURS = ("false alarm", "stopped", "advised")  # ends of incidents that were no fault of a host


@dataclass(frozen=True)
class HostIncident:
    """Something that went wrong on a host.

    Attributes:
        signal: which of Meta's signals it counts for; empty: by its kind.
        job: in which; empty: not known.
    """

    host: str
    unix_s: float
    kind: str
    job: str = ""
    signal: str = ""


def read_histories(places: Sequence[Path]) -> list[HostIncident]:
    """All incidents of these jobs, runs and tables, oldest first.

    Raises:
        UserError: a place is not there, or holds nothing that can be read as a history.
    """
    found: list[HostIncident] = []
    for place in places:
        if place.is_dir():
            found += _of_folder(place)
        elif place.is_file():
            found += _of_table(place)
        else:
            raise UserError(
                "is neither a file nor a folder", cure="give jobs, runs or tables of incidents", value=str(place)
            )
    return sorted(set(found), key=lambda one: (one.unix_s, one.host, one.kind))


def is_repair(incident: HostIncident) -> bool:
    """Whether it says that the host was repaired or replaced: what was before does not count any more."""
    return incident.kind.strip().lower().startswith(("repaired", "replaced"))


def is_of_program(incident: HostIncident, matcher: Matcher) -> bool:
    """Whether a program failed of itself, by the classes of `phalanx detect logs`: that is no fault of a host.

    Args:
        matcher: of the rules for failed jobs.
    """
    rule = matcher.find(incident.kind, "output")
    if rule is not None and rule.kind:
        return class_of(rule.kind).family in _OF_PROGRAMS
    # An exception's name without what comes after it in a log: KeyError in train.py.
    words = [incident.kind, *(_CAPITAL.sub(r" \1", name) for name in _EXCEPTION.findall(incident.kind))]
    names = {name.lower() for name, found in FAILURE_CLASSES.items() if found.family in _OF_PROGRAMS}
    return any(word.strip().lower() in names for word in words)


def signal_of(incident: HostIncident) -> str:
    """Which of Meta's signals it counts for; empty: none by its words."""
    if incident.signal:
        return incident.signal
    kind = incident.kind.lower()
    if "xid" in kind:
        return "xid_cnt"
    if "ticket" in kind or "repair" in kind:
        return "tickets"
    if "exclude" in kind:
        return "excl_jobid_count"
    if "evict" in kind or "drain" in kind or "out of rotation" in kind:
        return "out_count"
    if "node_fail" in kind or "node fail" in kind:
        return "single_node_node_fails" if "single" in kind else "multi_node_node_fails"
    return ""


def _of_folder(folder: Path) -> Iterator[HostIncident]:
    """A job or run, a folder of such, or one with tables."""
    files = list(_files_below(folder))
    reports = [path for path in files if path.parent.name == "incidents" and path.suffix == ".json"]
    reports = [path for path in reports if path.stem.isdigit()]
    kept = [path for path in files if path.parent.name == "incidents" and path.parent.parent.name == "telemetry"]
    lines = [path for path in files if path.name == "incidents.jsonl" or (path in kept and path.suffix == ".jsonl")]
    found = [path for path in files if path.name == "detections.jsonl"]
    tables = (
        [] if reports or lines or found else [*folder.glob("*.csv"), *folder.glob("*.json"), *folder.glob("*.jsonl")]
    )
    if not (reports or lines or found or tables):
        # A job to which nothing happened has no incidents: that is a history, too.
        if not ((folder / "job.json").exists() or (folder / "telemetry").exists()):
            cure = "give folders of jobs of `phalanx run`, of runs, or tables of incidents"
            raise UserError("holds no history of incidents", cure=cure, value=str(folder))
        return
    for path in reports:
        yield from _of_report(path)
    for path in lines:
        yield from _of_lines(path)
    for path in found:
        yield from _of_detections(path)
    for path in tables:
        yield from _of_table(path)


def _files_below(folder: Path) -> Iterator[Path]:
    """Files that may hold incidents, in order; not those in folders that hold none, and many others."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NO_HISTORY and not _IS_STEP.match(name))
        if Path(parent).name == "telemetry":
            folders[:] = [name for name in folders if name == "incidents"]
        yield from (Path(parent) / name for name in sorted(names) if name.endswith((".json", ".jsonl")))


def _of_report(path: Path) -> Iterator[HostIncident]:
    """What `phalanx run` wrote of an incident: hosts at fault by themselves, and those that were taken out."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        facts, job = [*map(dict, report["facts"])], str(report.get("job", ""))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"is no incident ({error})", cure="give files that phalanx run wrote", value=str(path)
        ) from None
    results = [fact.get("result") for fact in facts if fact.get("type") == "outcome"]
    if results and results[-1] in _NOT_OURS:
        return
    told = set()
    for fact in facts:
        host = str(fact.get("host") or "")
        if fact.get("type") == "seen" and fact.get("is_own") and host and host not in told:
            told.add(host)
            yield HostIncident(host, float(fact["unix_s"]), str(fact.get("what", "")), job)
        elif fact.get("type") == "lost" and fact.get("what"):
            yield HostIncident(str(fact["what"]), float(fact["unix_s"]), "taken out of the job", job, "out_count")


def _of_lines(path: Path) -> Iterator[HostIncident]:
    """Of a run's telemetry: those that name a host."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            host = str(row.get("host") or "")
            if host:
                yield HostIncident(host, row["at_ns"] / 1e9, str(row.get("kind", "")), path.parent.parent.name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a line that was being written


def _of_detections(path: Path) -> Iterator[HostIncident]:
    """What judges told the driver of `phalanx run`: of one or few hosts that its advice blames, outside of incidents,
    which have reports. What was said of a host's history is no new part of it."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            found = row["found"]
            hosts = {str(host) for who in found["who"] for host in who["hosts"]}
            if row["judge"] == "offenders" or row["incident"] or found["advice"] not in MACHINE_ADVICE:
                continue
            for host in sorted(hosts)[:_MOST_BLAMED]:
                yield HostIncident(host, float(row["unix_s"]), str(found["what"]), path.parent.name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # a line that was being written


def _of_table(path: Path) -> Iterator[HostIncident]:
    rows = list(_rows(path))
    if not rows:
        raise UserError("has no rows", cure="give a table with the columns host, unix_s and kind", value=str(path))
    for number, row in enumerate(rows, 1):
        if str(row.get("event_type", "")).endswith("_end"):
            continue
        place = f"{path}: row {number}"
        host = str(_first(row, _HOST) or "").strip()
        if not host:
            raise UserError("has no host", cure="name a column host, and fill it", field=place, value=_shown(row))
        kind = _first(row, _KIND) or ""
        if isinstance(kind, Mapping):
            kind = ": ".join(str(part) for part in (kind.get("Class"), kind.get("Desc")) if part)
        signal = str(row.get("signal") or "")
        if signal and signal not in SIGNALS:
            raise UserError("is no signal", cure=f"one of {', '.join(SIGNALS)}", field=place, value=signal)
        yield HostIncident(host, _time(row, place), str(kind), str(_first(row, _JOB) or ""), signal)


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", cure="give a CSV or JSON file", value=str(path)) from None
    if path.suffix in (".json", ".jsonl"):
        try:
            rows = (
                json.loads(text)
                if text.lstrip().startswith("[")
                else [json.loads(line) for line in text.splitlines() if line.strip()]
            )
        except (ValueError, RecursionError) as error:
            cure = "give a list of objects, or one object a line"
            raise UserError(f"is not JSON ({error})", cure=cure, value=str(path)) from None
        if not all(isinstance(row, Mapping) for row in rows):
            raise UserError("does not hold objects", cure="give a list of objects", value=str(path))
        return rows
    return list(csv.DictReader(io.StringIO(text)))


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _time(row: Mapping[str, Any], place: str) -> float:
    if row.get("event_time") not in (None, ""):  # days since the beginning of a trace
        value, unit = row["event_time"], DAY_S
    else:
        value, unit = _first(row, _TIME), 1.0
    try:
        at_s = float(value) * unit
    except (TypeError, ValueError):
        at_s = _of_iso(str(value))
    if not math.isfinite(at_s):
        cure = "name a column unix_s, or time with 2026-11-25T10:00:00Z"
        raise UserError("has no time", cure=cure, field=place, value=_shown(row))
    # In ns, us or ms, whatever the column is called: seconds from 1e11 on are those of the year 5138.
    return at_s / next((per_s for per_s in (1e9, 1e6, 1e3) if at_s / per_s > 1e8), 1.0)


def _of_iso(value: str) -> float:
    """NaN: it is no time."""
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        return math.nan


def _shown(row: Mapping[str, Any]) -> str:
    """A row for an error: its first columns with their values."""
    return ", ".join(f"{name}={value}" for name, value in list(row.items())[:8])
