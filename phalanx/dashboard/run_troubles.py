"""What is the matter with a run that goes on, told by its figures and its processes as soon as somebody looks.

The rules are those of alerts (`phalanx.telemetry.alerts.alert_rules`), so that a page and an alert never disagree about
what a spike is; but nobody has to ask for alerts, and what stands still is shown long before anybody would be woken.
A look costs a few milliseconds, and happens when a page is asked for, at most once in `LOOK_S`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.units import duration
from phalanx.dashboard.data_source import Run
from phalanx.telemetry.alerts.alert_config import Kind
from phalanx.telemetry.alerts.alert_rules import SEVERITIES, Limits, Seen, Verdict, judge
from phalanx.telemetry.alerts.observed_run import RunWatch, WatchedRun
from phalanx.telemetry.run_presence import Presence, presences

LOOK_S = 0.5
"""Several pages may ask; looks are no closer together."""

SHOWN_S = 60.0
"""A spike is over within a step, and is shown for so long at least."""

_WORDS: Mapping[Kind, str] = {
    "stall": "stands still",
    "not_finite": "not finite",
    "loss_spike": "loss spike",
    "gradient_spike": "gradient spike",
    "throughput": "slower",
    "disk": "disk full",
    "checkpoint": "checkpoint failed",
}
"""What is shown, and in two words how; the others are states of the run."""

_STILL_S, _USUAL_STEPS = 1.5, 2.0
_OUT_S = 0.5
_FIRST_STEPS = 3
_AT_FIRST = 20


@dataclass(frozen=True)
class Trouble:
    """One thing that is the matter.

    Attributes:
        words: two, for a badge; title: one line that says it all.
        is_bad: an error; else a warning.
        since_s: when it was first seen, Unix.
    """

    kind: Kind
    words: str
    title: str
    is_bad: bool
    since_s: float

    @property
    def look(self) -> str:
        """Its colour."""
        return "bad" if self.is_bad else "warn"

    @property
    def sign(self) -> str:
        """For those who do not see colours."""
        return "✕" if self.is_bad else "▲"


class RunTroubles:
    """Of all runs that are asked for; may be used from several threads."""

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._watched: dict[Path, _Watched] = {}

    def of(self, run: Run) -> list[Trouble]:
        """What is the matter now, the worst first; nothing of a run that has ended: its state says it all."""
        if run.folder is None:
            return []
        with self._lock:
            if not run.is_live:
                self._watched.pop(run.folder, None)
                return []
            # the disk that a copy lies on is not the run's
            but: tuple[Kind, ...] = ("disk",) if run.is_stored else ()
            watched = self._watched.setdefault(run.folder, _Watched(run.folder, self._unix_s, but))
        return watched.look()


class _Watched:
    """One run that goes on."""

    def __init__(self, folder: Path, unix_s: Callable[[], float], but: tuple[Kind, ...]) -> None:
        self._folder, self._unix_s, self._but = folder, unix_s, but
        self._lock = threading.Lock()
        self._watch: RunWatch | None = None
        self._first: tuple[int, int] | None = None
        self._ranks = 0
        self._looked_s = float("-inf")
        self._troubles: dict[Kind, Trouble] = {}

    def look(self) -> list[Trouble]:
        with self._lock:
            now_s = self._unix_s()
            if now_s - self._looked_s >= LOOK_S:
                self._look(now_s)
                self._looked_s = now_s
            return sorted(self._troubles.values(), key=lambda one: (not one.is_bad, one.since_s))

    def _look(self, now_s: float) -> None:
        known = presences(self._folder)
        process, run = (known[0].pid, known[0].started_ticks) if known else (0, 0), _described(self._folder, known)
        if self._watch is None or process != self._first or run.ranks > self._ranks:  # it was started, or is starting
            self._watch, self._first, self._ranks, self._troubles = RunWatch(run), process, run.ranks, {}
            seen = self._watch.look()
            # What happened just before anybody looked is to be seen too.
            seen = replace(seen, new=min(len(seen.steps), _AT_FIRST))
        else:
            seen = self._watch.look()
        limits = Limits()
        verdicts = {
            kind: verdict for kind, verdict in judge(seen, limits).items() if kind in _WORDS and kind not in self._but
        }
        self._take({**verdicts, "stall": stands_still(seen)}, now_s)

    def _take(self, verdicts: Mapping[Kind, Verdict], now_s: float) -> None:
        for kind, verdict in verdicts.items():
            known = self._troubles.get(kind)
            if verdict.state == "firing":
                since_s = known.since_s if known is not None else now_s
                is_bad = SEVERITIES[kind] == "error" and (kind != "stall" or bool(verdict.evidence.get("who")))
                self._troubles[kind] = Trouble(kind, _WORDS[kind], verdict.title, is_bad, since_s)
            elif verdict.state == "clear" and known is not None and now_s - known.since_s >= _shown_s(kind):
                del self._troubles[kind]


def _shown_s(kind: Kind) -> float:
    """For how long at least."""
    return 0.0 if kind in ("stall", "disk") else SHOWN_S


def stands_still(seen: Seen) -> Verdict:
    """A process of the run is stopped or gone, or the step takes clearly longer than steps usually do.

    Alerts wait for a minute before they call that a stall; who looks at the page wants to know at once.
    """
    out = [rank for rank in seen.ranks if rank.state in ("", "T", "t") and rank.since_s >= _OUT_S]
    who = [f"rank {rank.rank} is {'stopped' if rank.state else 'gone'}" for rank in out if rank.phase != "end"]
    if who and seen.phase != "end":
        more = f" and {len(who) - 3} more" if len(who) > 3 else ""
        return Verdict("firing", f"no progress after step {seen.step}: {', '.join(who[:3])}{more}", {"who": who})
    times = sorted(one.step_s for one in seen.steps[-64:] if one.step_s)
    if seen.phase != "step" or seen.quiet_s is None or seen.steps_here < _FIRST_STEPS or not times:
        return Verdict("clear")
    usual_s = times[len(times) // 2]
    if seen.quiet_s <= _STILL_S + _USUAL_STEPS * usual_s:
        return Verdict("clear")
    title = f"no step for {duration(seen.quiet_s)} after step {seen.step}; usually one takes {duration(usual_s)}"
    return Verdict("firing", title)


def _described(folder: Path, known: list[Presence]) -> WatchedRun:
    """The run as a watcher would be told of it, by what its ranks say of themselves."""
    if not known:
        return WatchedRun(folder.name, str(folder), 0, 0, ranks=0)
    first, here = known[0], socket.gethostname()
    on_this_host = max((one.rank + 1 for one in known if one.host == here), default=0)
    return WatchedRun(
        folder.name, str(folder), first.pid, first.started_ticks, ranks=on_this_host, world_size=first.world_size
    )
