"""What a host's writer has finished goes to object storage, in a thread of its own: nothing waits for it.

The writer works in a folder of this host. Whatever it has finished there is sent: Parquet files once, files of lines
(groups, clocks, dropped, incidents) again whenever they have grown, as ``TABLE/HOST.jsonl``. What could not be sent
stays and is tried again, after waits that double; a writer that comes later sends what an earlier one left. The host of
rank 0 also sends the small files of the run itself, so that its curves and its state can be seen there.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.core.files import read_regular
from phalanx.core.object_requests import cause_of
from phalanx.telemetry.clock_exchange import SharedFiles
from phalanx.telemetry.lost_telemetry import DROPPED
from phalanx.telemetry.remote_path import RemotePath
from phalanx.telemetry.run_presence import presences
from phalanx.telemetry.span_store import Part

TABLES = ("steps", "phases", "counters", "spans")
"""In this order: what is smallest and kept for good first."""

RUN_FILES = (
    "config.json", "environment.json", "run.json", "moved.json", "metrics.jsonl", "samples.jsonl",
    "alerts/alerts.jsonl", "ended.json",
)  # fmt: skip
"""Of the run folder; the end comes last."""

_RUN_FILES_S, _RUN_FILES_SHARE = 10.0, 0.05
"""Figures grow with every step and are sent as a whole: so seldom, and for no larger share of the time."""
_MOST_RUN_FILE_BYTES = 1 << 30
_LOOK_S = 1.0
_MOST_WAIT_S = 60.0


class SpanUploads:
    """Sends what is finished below `folder`, of one host, until it is closed.

    Args:
        keeps: Parquet files stay in the folder, too; else they are removed when they are sent.
        remote: where telemetry of the run lies, of all its hosts.
        run: folder of the run, whose own files go there too; None: it is elsewhere.
        prune: called in the thread, about once a minute, when all is sent: lets old spans go there.
        began: called with the path of each file before it is sent; tests look at it.

    Attributes:
        files: small ones that all hosts of the run see.
        sent: files that are there.
        problem: why the last try failed; empty: it did not.
    """

    def __init__(
        self,
        folder: Path,
        remote: RemotePath,
        host: str,
        *,
        keeps: bool = False,
        run: Path | None = None,
        prune: Callable[[], None] = lambda: None,
        prune_s: float = 60.0,
        began: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._folder, self._remote, self._host, self._began = folder, remote, host, began
        self._sent_names: set[str] | None = None if keeps else set()  # None: not known yet
        self._keeps = keeps
        self._earlier: dict[Path, bytes] = {}  # lines that are there of a folder that this host has no more
        self._prune, self._prune_s = prune, prune_s
        self._line_sizes: dict[Path, int] = {}
        self._run_files = None if run is None else _RunFiles(run, remote.parent, host)
        self._wake, self._is_ending = threading.Event(), False
        self.sent, self.problem = 0, ""
        self.files = RemoteFiles(remote)
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> bool:
        """Send what is there, for so long at most; whether all is sent."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(within_s)
        return not self._thread.is_alive() and not self.problem

    def left(self) -> list[tuple[Path, str]]:
        """Files that are to be sent, with their names in storage."""
        found = []
        for table in TABLES:
            paths = sorted((self._folder / table / self._host).glob("*.parquet"))
            names = {path: f"{table}/{self._host}/{path.name}" for path in paths if Part.of(path) is not None}
            found += [(path, name) for path, name in names.items() if name not in (self._sent_names or ())]
        lines = [(self._folder / table / f"{self._host}.jsonl", table) for table in ("groups", "clocks", DROPPED)]
        for path, table in (*lines, (self._folder / "incidents.jsonl", "incidents")):
            if path.exists() and path.stat().st_size != self._line_sizes.get(path):
                found.append((path, f"{table}/{self._host}.jsonl"))
        return found

    def _run(self) -> None:
        wait_s, pruned_s = _LOOK_S, time.monotonic()
        while True:
            is_last = self._is_ending
            try:
                self._send_all()
                if time.monotonic() - pruned_s > self._prune_s:
                    pruned_s = time.monotonic()
                    self._prune()
                self.problem, wait_s = "", _LOOK_S
            except Exception as error:  # of a client library: most of its errors are not OSErrors
                self.problem = f"{self._remote}: {cause_of(error)}"
                wait_s = min(2 * wait_s, _MOST_WAIT_S)
            if is_last:
                return
            if self._wake.wait(wait_s * random.uniform(0.5, 1.5)):
                self._wake.clear()

    def _send_all(self) -> None:
        if self._sent_names is None:  # an earlier writer may have sent some
            places = (self._remote / table / self._host for table in TABLES)
            there = [path for place in places for path in place.glob("*.parquet")]
            self._sent_names = {f"{path.parent.parent.name}/{self._host}/{path.name}" for path in there}
        for path, name in self.left():
            self._began(path)
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # pruned meanwhile
            if path.suffix == ".parquet":
                (self._remote / name).write_bytes(content)
                if self._keeps:
                    self._sent_names.add(name)
                else:
                    path.unlink(missing_ok=True)
            else:
                (self._remote / name).write_bytes(self._earlier_lines(path, name, content) + content)
                self._line_sizes[path] = len(content)
            self.sent += 1
        if self._run_files is not None:
            self._run_files.send(is_last=self._is_ending)

    def _earlier_lines(self, path: Path, name: str, content: bytes) -> bytes:
        if path not in self._earlier:
            try:
                there = (self._remote / name).read_bytes()
            except FileNotFoundError:
                there = b""
            here = set(content.splitlines(keepends=True))
            lines = [line for line in there.splitlines(keepends=True) if line not in here and line.endswith(b"\n")]
            self._earlier[path] = b"".join(lines)
        return self._earlier[path]


class _RunFiles:
    """The run's own small files, from the host of its rank 0."""

    def __init__(self, run: Path, remote: RemotePath, host: str) -> None:
        self._run, self._remote, self._host = run, remote, host
        self._is_first = False
        self._sent: dict[str, tuple[int, int]] = {}
        self._next_s = float("-inf")

    def send(self, *, is_last: bool) -> None:
        """What has changed, if it is time. OSError: storage refused."""
        began_s = time.monotonic()
        self._is_first = self._is_first or self._has_rank_0()
        if not self._is_first or (began_s < self._next_s and not is_last):
            return
        for name in RUN_FILES:
            self._send(name)
        self._next_s = time.monotonic() + max(_RUN_FILES_S, (time.monotonic() - began_s) / _RUN_FILES_SHARE)

    def _has_rank_0(self) -> bool:
        """Of hosts that share the folder one sends."""
        return any(one.rank == 0 and one.host == self._host for one in presences(self._run, (0,)))

    def _send(self, name: str) -> None:
        try:
            found = (self._run / name).stat()
            if self._sent.get(name) == (found.st_size, found.st_mtime_ns):
                return
            content = read_regular(self._run / name, _MOST_RUN_FILE_BYTES)
        except OSError:  # one that is not there, cannot be read, or is too large, keeps back no other
            return
        (self._remote / name).write_bytes(content)
        self._sent[name] = found.st_size, found.st_mtime_ns


class RemoteFiles(SharedFiles):
    """The same in object storage."""

    def __init__(self, remote: RemotePath) -> None:
        self._remote = remote

    def write(self, name: str, content: bytes) -> None:
        """Write one whole. OSError: storage refused."""
        (self._remote / name).write_bytes(content)

    def read(self, name: str) -> bytes | None:
        """One; None: it is not there, or storage does not answer now."""
        try:
            return (self._remote / name).read_bytes()
        except OSError:
            return None
