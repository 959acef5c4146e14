"""Runs that lie in object storage, kept as folders on this host while a dashboard shows them.

Pages read folders: figures are read on from where reading stood, spans by DuckDB from many files at once, and several
parts of a page ask at the same time. So what storage holds of runs is fetched into a folder, small things first, and
looked for anew every few seconds; questions of a page never wait for storage. Checkpoints and the like stay where they
are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.core.object_requests import cause_of
from phalanx.telemetry.remote_path import RemotePath
from phalanx.telemetry.span_store import Part

EVERY_S = 5.0
MOST_SPAN_BYTES = 4 << 30
"""Of single spans, the newest; sums and figures are fetched whatever they take."""

_SHARE_OF_TIME = 0.1  # a look takes no more of it: where it takes long, looks are rare
_MOST_FILE_BYTES = 1 << 30
_DEEPEST = 3
_AT_ONCE = 16
_OF_A_RUN = {"metrics.jsonl", "telemetry", "config.json", "environment.json"}
_OF_TELEMETRY = {"steps", "spans"}
_LEFT_THERE = {"checkpoints", "profile", "wandb", "tensorboard", "tokenizer", "processes"}
"""Of no page, or true only on the hosts of the run."""
_TELEMETRY = "telemetry"


class StoredRuns:
    """What lies at a URL, as folders below `folder`.

    Args:
        url: of a run, of its telemetry, or of a place that runs lie in.
        options: of fsspec's file system, beside what the environment says.
        most_span_bytes: see `MOST_SPAN_BYTES`.
        rows_only: of telemetry only what is there and since when, as a table of runs needs it.

    Attributes:
        problem: why storage was not read the last time; empty: it was.
        left_span_bytes: of older spans that were left there.

    Raises:
        UserError: it is no URL of storage.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        *,
        most_span_bytes: int = MOST_SPAN_BYTES,
        rows_only: bool = False,
    ) -> None:
        self.url, self.folder = url.rstrip("/"), folder
        self._remote = RemotePath.of(self.url, options)
        self._most_span_bytes, self._rows_only = most_span_bytes, rows_only
        self._known: dict[Path, tuple[object, ...]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""
        self.left_span_bytes = 0

    def begin(self) -> None:
        """Fetch what is there, and go on in a thread until `close`.

        Raises:
            UserError: storage does not answer, or no run lies there.
        """
        began_s = time.monotonic()
        self.fetch()
        self._thread = threading.Thread(
            target=self._go_on, args=(time.monotonic() - began_s,), name="stored runs", daemon=True
        )
        self._thread.start()

    def fetch(self) -> None:
        """Fetch what is there.

        Raises:
            UserError: storage does not answer, or no run lies there.
        """
        try:
            count = self.refresh()
        except Exception as error:  # of a client library: most of its errors are not OSErrors
            cure = "see to bucket, credentials (in the environment) and network"
            raise UserError(f"{self.url} cannot be read ({cause_of(error)})", cure=cure) from error
        if not count:
            cure = "give the URL that telemetry.upload had, or one above it"
            raise UserError("no run lies there", cure=cure, value=self.url)

    def close(self) -> None:
        """Fetch nothing more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def refresh(self) -> int:
        """Fetch what is new, and take away what is there no more; how many runs there are."""
        runs = list(self._runs(self._remote, self.folder, 0))
        wanted: dict[Path, RemotePath] = {}
        for run, inner in runs:
            wanted |= _files_of(run, inner)
        wanted = dict(self._affordable({path: one for path, one in wanted.items() if self._is_within(path)}))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for path, told in pool.map(self._fetch, wanted.items()):
                self._known[path] = told
        for path in self._known.keys() - wanted.keys():
            path.unlink(missing_ok=True)
            del self._known[path]
        self.problem = ""
        return len(runs)

    def _go_on(self, took_s: float) -> None:
        while not self._over.wait(max(EVERY_S, took_s / _SHARE_OF_TIME)):
            began_s = time.monotonic()
            try:
                self.refresh()
            except Exception as error:  # the next look may do better, and pages say it meanwhile
                self.problem = f"{self.url} cannot be read ({cause_of(error)})"
            took_s = time.monotonic() - began_s

    def _runs(self, place: RemotePath, folder: Path, depth: int) -> Iterator[tuple[Path, dict[str, RemotePath]]]:
        """Folders of runs with what lies directly in them, by name; none is looked for inside a run."""
        inner = {one.name: one for one in place.iterdir()}
        if inner.keys() & _OF_A_RUN:
            yield folder, inner
        elif inner.keys() & _OF_TELEMETRY:  # its telemetry alone
            yield folder, {_TELEMETRY: place}
        elif depth < _DEEPEST:
            for name, one in inner.items():
                if one.size_bytes is None:
                    yield from self._runs(one, folder / name, depth + 1)

    def _is_within(self, path: Path) -> bool:
        """Names of objects are any text, and none is to lead out of the folder."""
        return path.is_relative_to(self.folder) and ".." not in path.parts

    def _affordable(self, wanted: Mapping[Path, RemotePath]) -> Iterator[tuple[Path, RemotePath]]:
        """All but the oldest spans, and single files that are too large."""
        spans: list[tuple[int, Path, RemotePath]] = []
        for path, remote in wanted.items():
            part = Part.of(path) if path.parent.parent.name == "spans" else None
            if part is not None:
                spans.append((part.last_step, path, remote))
            elif (remote.size_bytes or 0) <= _MOST_FILE_BYTES:
                yield path, remote
        room = self._most_span_bytes
        for _, path, remote in sorted(spans, key=lambda one: (-one[0], one[1])):
            room -= remote.size_bytes or 0
            if room >= 0:
                yield path, remote
        self.left_span_bytes = max(-room, 0)

    def _fetch(self, wanted: tuple[Path, RemotePath]) -> tuple[Path, tuple[object, ...]]:
        """A file, if it is another than the one that is here."""
        path, remote = wanted
        told = remote.size_bytes, remote.modified_s
        if self._known.get(path) == told:
            return path, told
        is_named_only = self._rows_only and path.suffix == ".parquet"
        try:
            content = b"" if is_named_only else remote.read_bytes()
        except FileNotFoundError:  # taken away since it was listed
            return path, (None,)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, content)
        except (NotADirectoryError, FileExistsError, IsADirectoryError):  # objects may be named a and a/b, files not
            return path, (None,)
        if remote.modified_s is not None:
            os.utime(path, (remote.modified_s, remote.modified_s))
        return path, told


def _files_of(run: Path, inner: Mapping[str, RemotePath]) -> dict[Path, RemotePath]:
    """The files of a run, by where they come."""
    found: dict[Path, RemotePath] = {}
    for name, one in inner.items():
        if one.size_bytes is not None:
            found[run / name] = one
        elif name not in _LEFT_THERE:
            found |= {run / name / file.path[len(one.path) + 1 :]: file for file in one.files_below()}
    return found


def _write(path: Path, content: bytes) -> None:
    """Files of lines grow: readers go on from where they stood."""
    with suppress(OSError):
        if path.suffix == ".jsonl" and content.startswith(before := path.read_bytes()):
            with path.open("ab") as file:
                file.write(content[len(before) :])
            return
    with atomic_writer(path) as target:
        target.write(content)


def is_store_url(where: str) -> bool:
    """Whether that is a place in object storage, and no folder or driver."""
    return "://" in where and not where.startswith(("http://", "https://"))
