"""Each alert once: trouble is an episode from its first sight until it is over, whatever starts and ends meanwhile.

``RUN/alerts/episodes.json`` holds the episodes that are going on, so that a resumed run does not report them again;
``RUN/alerts/alerts.jsonl`` has a line for each alert, and one for each receiver that took it or did not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from phalanx.core.errors import UserError
from phalanx.core.files import read_regular, write_json
from phalanx.telemetry.alerts.alert_config import Kind
from phalanx.telemetry.alerts.alert_rules import SEVERITIES, Severity, Verdict

FOLDER = "alerts"
EPISODES, ALERTS = "episodes.json", "alerts.jsonl"
VERSION = 1

_AGAIN_S = 600.0
"""Trouble that comes back so soon is the same trouble."""
_EACH: tuple[Kind, ...] = ("incident", "detection", "failed", "stopped", "finished")
"""Each of these is one of its own."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Alert:
    """One message: what, when, who, the figures that show it, and where to look.

    Attributes:
        number: of the run's alerts, from 1.
        title: one line that says it all.
        host: where the run is watched.
        link: a page of the dashboard, or the path of the run folder.
    """

    number: int
    kind: Kind
    severity: Severity
    title: str
    run: str
    folder: str
    host: str
    unix_s: float
    step: int | None
    evidence: Mapping[str, Any]
    link: str

    def to_json(self) -> dict[str, Any]:
        """As receivers get it; docs/alerts.md describes the fields."""
        return {"version": VERSION, **vars(self), "evidence": dict(self.evidence)}

    def text(self) -> str:
        """For a mail or a chat."""
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.unix_s))
        lines = [self.title, "", f"when: {when}", f"run: {self.run}", f"host: {self.host}"]
        lines += [f"{name}: {_said(value)}" for name, value in self.evidence.items() if value not in (None, "", [], 0)]
        return "\n".join([*lines, "", self.link])


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Subject:
    """The run that alerts are of.

    Attributes:
        link: web address of a dashboard; empty: there is none.
    """

    run: str
    folder: Path
    host: str
    link: str = ""

    def alert(self, number: int, kind: Kind, verdict: Verdict, now_s: float) -> Alert:
        """What a verdict is reported as."""
        step = verdict.evidence.get("step")
        link = str(self.folder)
        if self.link:
            state = {"run": str(self.folder)} | ({} if step is None else {"step": step})
            page = "run"
            if kind == "slow_rank":
                page, state = "machines", {"run": str(self.folder)}
                if "first_step" in verdict.evidence:
                    state["steps"] = f"{verdict.evidence['first_step']}:{step}"
            link = f"{self.link.rstrip('/')}/{page}?{urlencode(state)}"
        title, severity = verdict.title, SEVERITIES[kind]
        folder = str(self.folder)
        return Alert(number, kind, severity, title, self.run, folder, self.host, now_s, step, verdict.evidence, link)


class Episodes:
    """Which kinds of trouble are going on in a run, kept in its folder; for one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER / EPISODES
        self._active: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._recall()

    @property
    def active(self) -> Mapping[str, float]:
        """Since when each kind that goes on does, seconds since 1970."""
        return self._active

    def begun(
        self, verdicts: Mapping[Kind, Verdict], now_s: float, *, each: bool = False
    ) -> list[tuple[int, Kind, Verdict]]:
        """The verdicts that begin an episode, numbered; they are written down before they are returned.

        Args:
            each: what comes so soon after another of its kind is not that one.
        """
        found: list[tuple[int, Kind, Verdict]] = []
        before = dict(self._active)
        for kind, verdict in verdicts.items():
            if verdict.state == "firing" and kind not in self._active:
                self._active[kind] = now_s
                is_new = each or kind in _EACH or now_s - self._ended.get(kind, float("-inf")) > _AGAIN_S
                if is_new:
                    self.counts[kind] = self.counts.get(kind, 0) + 1
                    found.append((sum(self.counts.values()), kind, verdict))
            elif verdict.state == "clear" and kind in self._active:
                del self._active[kind]
                self._ended[kind] = now_s
        if self._active != before:
            self._keep()
        return found

    def _recall(self) -> None:
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            kept = json.loads(read_regular(self._path, _MOST_BYTES))
            active, ended, counts = (dict(kept[name]) for name in ("active", "ended", "counts"))
            times = [{str(kind): float(at_s) for kind, at_s in found.items()} for found in (active, ended)]
            self.counts = {str(kind): int(count) for kind, count in counts.items()}
            self._active, self._ended = times

    def _keep(self) -> None:
        with suppress(OSError):  # a full disk is what may be reported
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, {"active": self._active, "ended": self._ended, "counts": self.counts})


class AlertLog:
    """``alerts.jsonl``: appended to by several threads, a line by one call."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / FOLDER / ALERTS, threading.Lock()

    def raised(self, alert: Alert) -> None:
        """Keep an alert."""
        self._append({"event": "alert", **alert.to_json()})

    def delivered(self, alert: Mapping[str, Any], receiver: str, problem: str) -> None:
        """Keep what became of it at one receiver; `problem` empty: it was taken."""
        event = "given up" if problem else "delivered"
        kept = {"event": event, "number": alert.get("number"), "to": receiver, "unix_s": time.time()}
        self._append(kept | ({"problem": problem} if problem else {}))

    def _append(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode(errors="replace")
        with self._lock, suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def read_alerts(run: Path) -> list[dict[str, Any]]:
    """The alerts of the run in a folder, oldest first, each with ``sent``: who took it, and who did not.

    Raises:
        UserError: there is no such folder.
    """
    if not run.is_dir():
        raise UserError("is no folder", cure="give the folder of a run; `phalanx runs` lists them", value=str(run))
    found: list[dict[str, Any]] = []
    by_number: dict[Any, dict[str, Any]] = {}
    with suppress(FileNotFoundError):
        for line in (run / FOLDER / ALERTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                entry = json.loads(line)
                event = entry.pop("event")
                if event == "alert":
                    by_number[entry["number"]] = entry | {"sent": []}
                    found.append(by_number[entry["number"]])
                else:
                    by_number[entry.pop("number")]["sent"].append(entry)
    return found
