"""What the dashboard shows: a folder of runs, one run, or a job by the URL of its driver.

A run has an id, its path below the folder that was asked for (``.`` for that folder itself), which stands in links. No
id leads outside that folder. Runs of `phalanx train` and jobs of `phalanx run` are found alike; where both share a
folder they are one.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from phalanx.core.errors import UserError, not_permitted
from phalanx.core.units import duration
from phalanx.run.job_folder import NAME, Card, life, read_card
from phalanx.run.job_rows import card_of, state_of, with_card
from phalanx.telemetry.living_ranks import LIVING, State
from phalanx.telemetry.run_access import as_text, is_closed, is_folder, is_there, written_at
from phalanx.telemetry.run_list import (
    RunRow,
    closed_row,
    is_locked,
    is_run,
    read_config,
    read_run,
    records_spans,
    run_folders,
)

if TYPE_CHECKING:
    from phalanx.dashboard.stored_runs import StoredRuns
    from phalanx.run.api.api_client import Client

T = TypeVar("T")
Kind = Literal["folder", "run", "driver"]

SELF = "."
"""The id of a source that is one run."""

_ROW_FILES = (
    "metrics.jsonl",
    "config.json",
    "run.json",
    "ended.json",
    "out_of_memory.json",
    "environment.json",
    "job.json",
)
_LIST_AGE_S = 1.0
"""A list of runs is read anew after so long: several parts of one page ask for it."""
QUIET_S = 30.0
"""Figures of a run that goes on are old when nothing was written for so long, or for a few of its own intervals."""
_INTERVALS = 3
_STORED_QUIET_S = 180.0
"""Of a run in object storage, where its hosts send what they have about once a minute."""


@dataclass(frozen=True)
class Freshness:
    """How old what is known of a run is.

    Attributes:
        written_unix_s: when its figures were last written; None: never.
        is_live: whether it goes on, so that new figures are expected.
        problem: why nothing newer is known; empty: nothing is wrong.
        quiet_s: without anything new for so long, it is old.
    """

    written_unix_s: float | None
    is_live: bool
    problem: str = ""
    quiet_s: float = QUIET_S

    def is_old(self, now_unix_s: float) -> bool:
        """Whether people should be warned."""
        quiet = self.written_unix_s is not None and now_unix_s - self.written_unix_s > self.quiet_s
        return bool(self.problem) or (self.is_live and quiet)


@dataclass(frozen=True)
class Run:
    """A run with its place.

    Attributes:
        id: as in links.
        folder: None where only its driver is known.
        row: what the table of runs says of it.
        card: of a job of `phalanx run`; None for others.
        is_stored: it lies in object storage, and `folder` is a copy on the host of the dashboard.
    """

    id: str
    folder: Path | None
    row: RunRow
    card: Card | None = None
    is_stored: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.row.name

    @property
    def is_live(self) -> bool:
        """Whether it goes on."""
        return self.row.state in LIVING


class DataSource:
    """Runs by their ids, and the driver of a job; may be used from several threads.

    Attributes:
        kind: a folder with any number of runs; one run; or a driver somewhere.
        where: the folder or URL, as it was given.
    """

    def __init__(
        self,
        kind: Kind,
        where: str,
        root: Path | None,
        connect: Callable[[], Client] | None = None,
        store: StoredRuns | None = None,
    ) -> None:
        self.kind, self.where, self._store = kind, where, store
        self._root, self._connect = root, connect
        self._lock = threading.Lock()
        self._listed: tuple[float, list[Run]] = (0.0, [])
        self._rows: dict[Path, tuple[object, Run]] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> DataSource:
        """A folder of runs, or one run.

        Raises:
            UserError: there is no such folder.
        """
        if is_closed(folder):
            raise not_permitted(folder)
        if not is_folder(folder):
            problem = "is a file" if folder.exists() else "is not there"
            cure = "give a folder that runs lie in, a run, or the URL of a driver"
            raise UserError(f"no folder of runs: it {problem}", cure=cure, value=str(folder))
        kind: Kind = "run" if is_run(folder) or read_card(folder) is not None else "folder"
        return cls(kind, str(folder), folder.resolve())

    @classmethod
    def of_store(cls, store: StoredRuns) -> DataSource:
        """Runs in object storage, of which folders are here."""
        kind: Kind = "run" if is_run(store.folder) else "folder"
        return cls(kind, store.url, store.folder.resolve(), store=store)

    def as_given(self, text: str) -> str:
        """Text that names folders, with the URL in the place of folders that stand for it."""
        return text if self._store is None or self._root is None else text.replace(str(self._root), self._store.url)

    def rows(self) -> list[RunRow]:
        """What the table of runs says of each, the newest first."""
        return [replace(run.row, folder=self.as_given(run.row.folder)) for run in self.runs()]

    @property
    def is_stored(self) -> bool:
        """Whether runs lie in object storage, so that only what was sent there can be shown."""
        return self._store is not None

    @classmethod
    def of_driver(cls, url: str, connect: Callable[[], Client]) -> DataSource:
        """A job by the URL of its driver; `connect` makes a client for it."""
        return cls("driver", url, None, connect)

    def runs(self) -> list[Run]:
        """All runs, the newest first; read anew once a second at most."""
        with self._lock:
            read_s, found = self._listed
            if time.monotonic() - read_s > _LIST_AGE_S or not found:
                found = sorted(self._read_all(), key=lambda run: (-run.row.written, run.id))
                self._listed = time.monotonic(), found
            return found

    def forget(self) -> None:
        """The next list is read anew, since something was changed."""
        with self._lock:
            self._listed = (0.0, [])

    def run(self, run_id: str = "") -> Run:
        """One run; empty: the newest.

        Links of alerts name a run by its whole path, on the host where it goes on: what of that lies below this folder,
        which may be mounted elsewhere here, is that run.

        Raises:
            UserError: there is none of that id.
        """
        if self._root is not None and run_id:
            parts = Path(run_id).parts
            for least in range(len(parts) if run_id.startswith("/") else 1):
                folder = self._folder(str(Path(*parts[least:])))
                if folder is not None and (found := self._read(folder)) is not None:
                    return found
            for run in self.runs() if "\\x" in run_id else ():
                if run.id == run_id:
                    return run
            if len(parts) > 1 and self.kind == "run" and run_id.startswith("/") and parts[-1] == self._root.name:
                return self.run(SELF)
        else:
            for run in self.runs():
                if run_id in ("", run.id):
                    return run
        cure = "choose one on the page Runs"
        problem = "there is no such run" if run_id else "there are no runs yet"
        raise UserError(problem, cure=cure, value=run_id[:200] or None)

    def freshness(self, run: Run) -> Freshness:
        """How old what is known of a run is."""
        if run.folder is None:
            return Freshness(
                run.row.written or None, run.is_live, run.row.why if run.row.state in ("stopped", "failed") else ""
            )
        problem = ""
        if self._store is not None:
            return Freshness(run.row.written or None, run.is_live, self._store.problem, _STORED_QUIET_S)
        if run.card is not None and run.card.status is None and life(run.card) == "dead":
            problem = "its driver is dead"
        if not is_there(run.folder / "metrics.jsonl"):  # it only begins, or its script keeps no figures
            return Freshness(None, run.is_live, problem)
        quiet_s = max(QUIET_S, _INTERVALS * _interval_s(run)) if run.is_live else QUIET_S
        return Freshness(run.row.written, run.is_live, problem, quiet_s)

    def ask(self, run: Run, question: Callable[[Client], Awaitable[T]]) -> T:
        """What the driver of a run answers. Not to be called from an event loop.

        Raises:
            ConnectionError: it has none, or it does not answer.
            UserError: it refuses.
        """

        async def answer() -> T:
            async with self._client(run) as client:
                return await question(client)

        return asyncio.run(answer())

    def _client(self, run: Run) -> Client:
        if self._connect is not None:
            return self._connect()
        if run.folder is None or run.card is None:
            raise ConnectionError("no driver looks after this run")
        if run.card.status is not None:
            raise ConnectionError(f"the job has ended: {run.card.ended}")
        from phalanx.run.api.api_client import Client

        return Client(run.folder)

    def _read_all(self) -> list[Run]:
        if self._root is None:
            return [self._read_driver()]
        closed: list[Path] = []
        found = [self._read(folder) for folder in run_folders(self._root, closed=closed, also=NAME)]
        return [run for run in (*found, *map(self._read, closed)) if run is not None]

    def _folder(self, run_id: str) -> Path | None:
        """The folder of an id; None: it leads elsewhere."""
        assert self._root is not None, "only a folder has ids below it"
        try:
            folder = (self._root / run_id).resolve()
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                folder.lstat()
        except (OSError, ValueError):  # such as a name that is too long
            return None
        return folder if folder.is_relative_to(self._root) else None

    def _read(self, folder: Path) -> Run | None:
        """A run; its files are read only where one has changed since."""
        state = (*_states(folder), is_locked(folder), _records_spans(folder))
        known = self._rows.get(folder)
        # Whether a driver lives, and what a run does that goes on, no file says; nor whether one in storage does, for
        # which time tells.
        is_same = known is not None and known[0] == state and self._store is None
        if is_same and known is not None and known[1].card is None and not known[1].is_live:
            return known[1]
        found = self._read_now(folder)
        if found is not None:
            self._rows[folder] = state, found
        return found

    def _read_now(self, folder: Path) -> Run | None:
        assert self._root is not None, "only a folder is read"
        card = card_of(folder)
        if is_closed(folder) and folder != self._root:
            return Run(self._id(folder), folder, closed_row(folder, self._root))
        if not is_run(folder) and card is None:
            return None
        row = read_run(folder, self._root)
        if self._store is not None:
            row = _stored_row(row, folder)
        if card is not None:
            row = with_card(row, card, is_run(folder))
        return Run(self._id(folder), folder, row, card, self.is_stored)

    def _id(self, folder: Path) -> str:
        """A name that is not UTF-8 could stand in no link: its bytes are written out."""
        assert self._root is not None, "only a folder has ids below it"
        return as_text(folder.relative_to(self._root))

    def _read_driver(self) -> Run:
        nowhere = Run(SELF, None, _row_of_driver(self.where, "stopped", why="not asked yet"))
        try:
            status = self.ask(nowhere, lambda client: client.status(0))
        except (ConnectionError, UserError) as error:
            return replace(nowhere, row=_row_of_driver(self.where, "stopped", why=str(error)))
        state: State = "running" if status.status is None else state_of(status.status)
        step = status.step if status.step >= 0 else None
        why = status.ended if state in ("stopped", "failed") else ""
        return Run(SELF, None, _row_of_driver(status.job, state, step=step, written=status.unix_s, why=why))


def _records_spans(folder: Path) -> bool | None:
    """None: this user may not know."""
    try:
        return records_spans(folder)
    except PermissionError:
        return None


def _interval_s(run: Run) -> float:
    """Between two times that a run writes figures, by its settings and its speed; 0: not known."""
    assert run.folder is not None, "asked for only where there is a folder"
    try:
        settings = read_config(run.folder)
        tokens = settings["train"]["global_batch"] * settings["data"]["sequence_length"]
        return float(settings["logging"]["every_steps"] * tokens / (run.row.tokens_per_s or math.inf))
    except (UserError, KeyError, TypeError, ArithmeticError):
        return 0.0


def _states(folder: Path) -> Iterator[object]:
    """Which files a row is read from, and how far they are written."""
    for name in _ROW_FILES:
        try:
            now = (folder / name).stat()
        except OSError:
            yield None
        else:
            yield now.st_ino, now.st_size, now.st_mtime_ns


def _stored_row(row: RunRow, folder: Path) -> RunRow:
    """What can be said of a run from the files that its hosts sent: locks and processes are not among them."""
    figures_s = row.written if is_there(folder / "metrics.jsonl") else 0.0  # else it is when the copy was made
    written = max([figures_s, *_written(folder)])
    # what it says of its end is sent after its last figures
    has_ended = is_there(folder / "ended.json") and written_at(folder / "ended.json") >= figures_s
    if row.state == "imported" or has_ended or (row.state == "finished" and row.step is not None and figures_s):
        return replace(row, written=written)
    age_s = max(time.time() - written, 0.0)
    if age_s < _STORED_QUIET_S:
        return replace(row, written=written, state="running", why="")
    why = f"its hosts have sent nothing for {duration(age_s)}: it may have ended, or died, or cannot reach the storage"
    return replace(row, written=written, state="unknown", why=why)


def _written(folder: Path) -> Iterator[float]:
    """When the newest sums of each host were sent."""
    for host in (folder / "telemetry" / "steps").glob("*"):
        with suppress(OSError):
            yield max((entry.stat().st_mtime for entry in os.scandir(host)), default=0.0)


def _row_of_driver(name: str, state: State, *, step: int | None = None, written: float = 0.0, why: str = "") -> RunRow:
    return RunRow(
        name=name,
        folder="",
        state=state,
        step=step,
        total_steps=None,
        tokens=None,
        loss=None,
        validation_loss=None,
        tokens_per_s=None,
        written=written,
        why=why,
        note="",
        tags=(),
    )
