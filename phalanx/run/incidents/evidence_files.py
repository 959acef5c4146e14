"""Reports of incidents and their evidence, kept on disk as they grow, in a thread: no disk makes the driver wait.

Evidence, which executors have of their ranks, becomes text in files beside the page: bounded, and without secrets.

All decisions stand in the journal before they are reported. A driver that dies in between leaves reports that lack
some, and the next one, whose decisions begin where those ended, does not report them again: so it completes reports
from the journal.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.run.clock import Now
from phalanx.run.decide.actions import Action, AddToIncident, CloseIncident, Finish, KeepDetection, OpenIncident
from phalanx.run.incidents import report
from phalanx.run.incidents.detections_file import DetectionsFile
from phalanx.run.incidents.incident_pages import beside, load, store
from phalanx.run.incidents.report import AnyFact, Incident, IncidentAction, Scrub
from phalanx.run.logs.log_lines import strip_ansi
from phalanx.run.messages import Evidence, WorkerEnded
from phalanx.run.secrets import Token, scrub_text

if TYPE_CHECKING:  # SQLAlchemy, which who only refuses or supervises a job does without
    from phalanx.run.journal import Entry

MOST_FILES = 24
"""Beside one page."""

FILE_CHARS = 256 << 10
_RANK_CHARS = 32 << 10
_KERNEL_LINES = 200
_MOST_KEPT = 512


@dataclass(frozen=True)
class Exhibit:
    """A file beside the page, such as ``rank-3.txt``; `matters`: it is kept before others."""

    name: str
    text: str
    matters: bool = False


def of_end(host: str, ended: WorkerEnded, scrub: Scrub) -> Exhibit:
    """The last lines of a rank."""
    about = f"rank {ended.rank} on {host}, attempt {ended.attempt}: {ended.summary or 'it said nothing'}"
    text = f"{about}\nexit code {ended.code}, at step {ended.step}\n\n{ended.text}".rstrip()
    return Exhibit(f"rank-{ended.rank}.txt", _clean(text, scrub) + "\n", matters=not ended.follows)


def of_evidence(host: str, evidence: Evidence, scrub: Scrub) -> Exhibit:
    """What a host has gathered of its ranks: stacks, and what the kernel said."""
    parts = [f"{host}, attempt {evidence.attempt}, gathered in {evidence.seconds:.2f} s"]
    for rank in evidence.ranks:
        known = [f"process state {rank.state}"] if rank.state else []
        known += [f"phase {rank.phase}"] if rank.phase else []
        known += [f"step {rank.step}"] if rank.step >= 0 else []
        known += [f"{rank.cpu_s:.1f} s of CPU time"] if rank.cpu_s > 0 else []
        known += [rank.note] if rank.note else []
        silent = "did not answer; " if rank.is_silent else ""
        stacks = rank.stacks[:_RANK_CHARS] or "no stacks"
        record = f"\nflight record:\n{rank.flight_record[:_RANK_CHARS]}" if rank.flight_record else ""
        parts.append(f"rank {rank.rank}: {silent}{', '.join(known) or 'nothing is known'}\n{stacks}{record}")
    if evidence.kernel_lines:
        parts.append("\n".join(["kernel log:", *evidence.kernel_lines[-_KERNEL_LINES:]]))
    return Exhibit(f"{_file_name(host)}.txt", _clean("\n\n".join(parts), scrub) + "\n")


def _clean(text: str, scrub: Scrub) -> str:
    """Without secrets and without anything that moves a terminal."""
    whole = scrub(text)[:FILE_CHARS].encode(errors="replace").decode()
    return "\n".join(strip_ansi(line) for line in whole.split("\n"))


def _file_name(host: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in host).strip(".")[:100] or "host"


class Exhibits:
    """Those of the present attempt that an incident may need."""

    def __init__(self) -> None:
        self._attempt = self._over = 0
        self._all: dict[str, Exhibit] = {}
        self._wanted: set[str] = set()
        self._written: set[str] = set()

    def add(self, attempt: int, exhibit: Exhibit) -> None:
        """Keep it; a newer attempt's replaces all, and of one that is over nothing is kept."""
        if attempt > self._attempt:
            self.clear()
            self._attempt = attempt
        if attempt == self._attempt > self._over and (exhibit.name in self._all or len(self._all) < _MOST_KEPT):
            self._all[exhibit.name] = exhibit
            self._written.discard(exhibit.name)

    def want(self, host: str) -> None:
        """What this host has gathered matters."""
        self._wanted.add(f"{_file_name(host)}.txt")

    def clear(self, over: int = 0) -> None:
        """Forget all; and what still comes of attempts up to `over` belongs to no report any more."""
        self._over = max(self._over, over)
        self._all.clear()
        self._wanted.clear()
        self._written.clear()

    def take(self, already: Iterable[str]) -> list[Exhibit]:
        """Those to be written now, as far as there is room beside those that have been."""
        names = set(already)
        waiting = [one for one in self._all.values() if one.name not in self._written]
        waiting.sort(key=lambda one: not (one.matters or one.name in self._wanted))
        taken = []
        for one in waiting:
            room = MOST_FILES if one.matters or one.name in self._wanted else MOST_FILES // 2
            if one.name in names or len(names) < room:
                names.add(one.name)
                self._written.add(one.name)
                taken.append(one)
        return taken


_log = logging.getLogger(__name__)

_MARK = '-incident"'
"""In every entry that tells of one: of many thousands of entries few have to be decoded."""


def earlier_decisions(entries: Iterable[Entry], before_epoch: int) -> Iterator[tuple[IncidentAction, float]]:
    """What drivers before the present one decided about incidents, and when.

    Args:
        entries: of a journal, in order.
        before_epoch: the present driver's: what it writes it also performs.
    """
    for entry in entries:
        if entry.kind != "action" or entry.epoch >= before_epoch or _MARK not in entry.json_text:
            continue
        try:
            action = msgspec.json.decode(entry.json_text, type=Action)
        except msgspec.DecodeError as error:  # of another version; the job goes on without this line of a report
            _log.warning("entry %d of the journal is not understood: %s", entry.sequence, error)
            continue
        if isinstance(action, OpenIncident | AddToIncident | CloseIncident):
            yield action, entry.unix_s


def completed(stored: Incident | None, journalled: Incident) -> Incident | None:
    """The report with what it lacks; None: it lacks nothing.

    What was stored stays as it is, since it may have been stored by a driver that knew of more secrets, unless
    something is missing in the midst of it.
    """
    if stored is None:
        return journalled
    facts = stored.facts
    if len(facts) >= len(journalled.facts):
        return None
    is_beginning = all(_is_same(one, other) for one, other in zip(facts, journalled.facts, strict=False))
    if is_beginning:
        return replace(stored, facts=[*facts, *journalled.facts[len(facts) :]])
    return replace(journalled, evidence=stored.evidence)


def _is_same(one: AnyFact, other: AnyFact) -> bool:
    # By its time, since a driver that knows of other secrets hides other words; or by its words, since what a driver
    # does at its start is reported a little later than it is written down.
    if type(one) is not type(other):
        return False
    return one.unix_s == other.unix_s or replace(one, unix_s=0.0) == replace(other, unix_s=0.0)


RETRY_S = 5.0
"""After a report could not be stored."""

_MOST_WAITING = 1024
"""Of what only explains; decisions are always taken."""


class LastLines(NamedTuple):
    """What a rank wrote last, for people who have not seen it."""

    rank: int
    text: str


class ReportKeeper:
    """Page and JSON of each incident, stored anew when something has been added.

    After a restart of the driver an incident that is open goes on from what is stored, once `recall` has completed it.

    Args:
        known: secrets that are taken out wherever they stand.
        stored: called in this object's thread with a report that has begun or ended and is stored, and its page.

    Attributes:
        problem: why the last report could not be stored; empty: it was.
    """

    def __init__(
        self,
        run_folder: Path,
        job: str,
        known: Iterable[Token | str] = (),
        stored: Callable[[Incident, Path], None] = lambda incident, page: None,
    ) -> None:
        self._folder, self._job, self._known, self._stored = run_folder, job, tuple(known), stored
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._exhibits = Exhibits()
        self._detections = DetectionsFile(run_folder)
        self._late: set[int] = set()  # reports that something was added to when they were over
        self._open: dict[int, Incident] = {}
        self._unsaved: dict[int, bool] = {}  # and whether `stored` is to be called
        self._last_ended: WorkerEnded | None = None
        self.problem = ""
        self._thread = threading.Thread(target=self._work, name="incidents", daemon=True)
        self._thread.start()

    # On the driver's loop

    def tell(self, action: Action, at: Now) -> None:
        """Take in an action about an incident."""
        if isinstance(action, OpenIncident | AddToIncident | CloseIncident):
            self._waiting.put(lambda: self._take(action, at.unix_s))
        elif isinstance(action, KeepDetection):
            self._waiting.put(lambda: self._detections.add(action, self._scrub))

    def recall(self, decisions: Sequence[tuple[IncidentAction, float]]) -> None:
        """Complete what is stored by `earlier_decisions`; before anything else."""
        self._waiting.put(lambda: self._recall(decisions))

    def heard(self, host: str, message: Evidence | WorkerEnded, at: Now) -> None:
        """Take what may explain a fault; with very much of it some is left out."""
        if isinstance(message, WorkerEnded):
            if message.by_us or (message.kind == "returned" and message.code == 0):
                return
            # Of one attempt the first rank that speaks for itself; of several that report the same, the lowest.
            last = self._last_ended
            is_new = last is None or message.attempt > last.attempt or (last.follows and not message.follows)
            is_alike = last is not None and (message.attempt, message.summary) == (last.attempt, last.summary)
            if is_new or (last is not None and is_alike and message.rank < last.rank):
                self._last_ended = message
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(lambda: self._explain(host, message))

    def last_lines(self, finish: Finish) -> LastLines | None:
        """The traceback or last lines of the rank whose fault ended the job; None: nothing is known."""
        ended = self._last_ended
        if ended is None or finish.status not in (1, 2) or not ended.text:
            return None
        return LastLines(ended.rank, self._scrub(f"rank {ended.rank} has ended with this:\n{ended.text.rstrip()}"))

    def close(self, within_s: float = 5.0) -> None:
        """Store what is waiting, and end; blocks for so long at most."""
        self._waiting.put(None)
        self._thread.join(within_s)

    # In the thread

    def _work(self) -> None:
        while True:
            is_over = self._take_all()
            for number in sorted(self._unsaved):
                self._store(number)
            if is_over:
                return

    def _take_all(self) -> bool:
        """Wait for something, and take in all that has come; whether there will be nothing more."""
        with suppress(queue.Empty):
            job = self._waiting.get(timeout=RETRY_S if self._unsaved else None)
            while job is not None:
                try:
                    job()
                except Exception:  # whatever is wrong with this, what comes next is kept
                    _log.exception("something of an incident could not be kept")
                job = self._waiting.get_nowait()
            return True
        return False

    def _take(self, action: IncidentAction, unix_s: float) -> None:
        before = self._so_far(action.number)
        if isinstance(action, AddToIncident) and action.where.host:
            self._exhibits.want(action.where.host)
        incident = report.after(before, action, self._job, unix_s, self._scrub)
        is_news = not isinstance(action, AddToIncident) and incident is not before
        if before is not None and before.outcome is not None:
            self._late.add(action.number)
        self._open[action.number] = incident
        self._unsaved[action.number] = is_news or self._unsaved.get(action.number, False)
        if incident.outcome is not None:  # what is heard after this belongs to the next one
            self._store(action.number)

    def _recall(self, decisions: Sequence[tuple[IncidentAction, float]]) -> None:
        """Store at once what is missing: nothing that is heard from now on belongs to what is over."""
        found: dict[int, Incident] = {}
        for action, unix_s in decisions:
            found[action.number] = report.after(found.get(action.number), action, self._job, unix_s, self._scrub)
        for number, journalled in found.items():
            stored = self._so_far(number)
            incident = completed(stored, journalled)
            if incident is None:
                continue
            # With the files that were written before a page named them.
            there = sorted(path.name for path in beside(self._folder, number).glob("*.txt"))
            self._open[number] = replace(incident, evidence=list(dict.fromkeys([*incident.evidence, *there])))
            self._unsaved[number] = stored is None or incident.outcome is not None
            self._store(number)

    def _explain(self, host: str, message: Evidence | WorkerEnded) -> None:
        if isinstance(message, WorkerEnded):
            self._exhibits.add(message.attempt, of_end(host, message, self._scrub))
        else:
            self._exhibits.add(message.attempt, of_evidence(host, message, self._scrub))
        for number in self._open:
            self._unsaved.setdefault(number, False)

    def _so_far(self, number: int) -> Incident | None:
        if number in self._open:
            return self._open[number]
        with suppress(UserError):
            return load(self._folder, number)
        return None

    def _store(self, number: int) -> None:
        incident = self._open[number]
        try:
            names = list(incident.evidence)
            # What is heard when a report is over belongs to the next one.
            for exhibit in [] if number in self._late else self._exhibits.take(names):
                path = beside(self._folder, number) / exhibit.name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, exhibit.text.encode(errors="replace"))
                names += [exhibit.name] if exhibit.name not in names else []
            incident = replace(incident, evidence=names)
            page = store(self._folder, incident)
        except OSError as error:
            if not self.problem:
                _log.warning("incident %d cannot be stored, which is tried again: %s", number, error)
            self.problem = str(error)
            return
        except Exception:  # a fault of ours: trying again would not help, and other reports are kept
            _log.exception("incident %d cannot be stored", number)
            self.problem = "a fault in the keeper of reports, see the driver's log"
            self._unsaved.pop(number)
            return
        self.problem = ""
        self._open[number] = incident
        is_news = self._unsaved.pop(number)
        if incident.outcome is not None:
            del self._open[number]
            if number in self._late:
                self._late.discard(number)
                return
            goes_on = incident.outcome.result == "false alarm"
            self._exhibits.clear(over=0 if goes_on else incident.attempt)
        if is_news:
            try:
                self._stored(incident, page)
            except Exception:  # whatever it does: reports are kept
                _log.exception("incident %d is stored, and could not be told of", incident.number)

    def _scrub(self, text: str) -> str:
        return scrub_text(text, self._known)
