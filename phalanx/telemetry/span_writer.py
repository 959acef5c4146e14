"""What the process of a host does that takes spans out of the rings of its ranks and keeps them.

One for each host and run (`phalanx.telemetry.writer_process`). Once a second it reads every ring in a folder of this
host's memory, appends what is new to an Arrow stream, and once a minute turns the stream into Parquet and sums
(`phalanx.telemetry.span_store`). It stays until all rings are closed and read, or their ranks are gone. What it has not
written when it is killed lies in the rings still, and how far it was beside them: the next one goes on from there.

Nothing that goes wrong here reaches training. What a full disk does not take is counted as dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute

from phalanx.core.files import write_json
from phalanx.telemetry.clock_exchange import HostClock, SharedFiles
from phalanx.telemetry.counters import COUNTERS, HostCounters
from phalanx.telemetry.lost_telemetry import note_dropped
from phalanx.telemetry.part_merging import merge_small_parts
from phalanx.telemetry.rank_deaths import DIED
from phalanx.telemetry.span_store import (
    SPANS,
    Names,
    live_places,
    parts,
    read_live,
    span_batch,
    stream_of,
    sums,
    write_part,
)
from phalanx.telemetry.spans import RingReader
from phalanx.telemetry.unfinished_spans import StillRings
from phalanx.telemetry.writer_place import STATE, WRITER, WriterSettings

if TYPE_CHECKING:  # most runs have no object storage, and do without fsspec
    from phalanx.telemetry.remote_path import RemotePath
    from phalanx.telemetry.span_uploads import SpanUploads

_SEND_S = 120.0  # for what is left at the end; what is not sent then stays for the next writer of this run and host
_LOOK_S = 0.02  # between two looks whether all ranks have ended, or a ring fills quickly: two loads a ring


class HostWriter:
    """What the process does, one call of `tick` a second.

    Args:
        rings: folder of this host with the rings of its ranks (``*.ring``).
        folder: where telemetry of the run is kept; may be shared by many hosts.
        host: this one's name.
        store_host: where the job's store is, as this host reaches it, by whose network hosts compare their clocks;
            None: the job has one host.
        remote: object storage where finished files are sent, in the background; None: nowhere.
        keeps: what was sent stays in `folder`, too.
        clock_ns: the monotonic clock by which ranks note spans.
    """

    def __init__(
        self,
        rings: Path,
        folder: Path,
        host: str,
        settings: WriterSettings | None = None,
        *,
        store_host: str | None = None,
        remote: RemotePath | None = None,
        keeps: bool = True,
        clock_s: Callable[[], float] = time.time,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._rings, self._folder, self._host = rings, folder, host
        self._settings = settings or WriterSettings()
        self._clock_s = clock_s
        self._readers: dict[Path, RingReader] = {}
        self._names = Names()
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._counters = HostCounters(host)
        self._samples: list[dict[str, Any]] = []
        self._still = StillRings(folder, host)
        self._part_began_s = clock_s()
        self._described: dict[Path, int] = {}
        self._died: set[Path] = set()
        self._begin_part()
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._file: Any = None
        files, self._uploads = SharedFiles(folder), self._begin_sending(remote, keeps)
        if self._uploads is not None:
            files = self._uploads.files
        self._clock = HostClock(folder, host, files, store_host, clock_ns=clock_ns)
        self._unix_offsets_ns: dict[int, int] = {}  # by attempt: all ranks of this host go by one clock
        self.dropped, self._problem = 0, ""
        self._noted_dropped = 0
        self._presence: Any = None
        self._presence_path = Path()
        self._guarded(0, self._announce)
        self._guarded(0, self._take_over)

    @property
    def is_idle(self) -> bool:
        """Whether there is no ring left, so that nothing more can come."""
        return not self._readers and not any(self._rings.glob("*.ring"))

    def run(self, ended: threading.Event) -> None:
        """Write until no ring is left, or `ended` is set."""
        while not ended.is_set():
            began_s = time.monotonic()
            self.tick()
            if self.is_idle:
                break
            # Training waits at its end until the last ring is read, so that is not put off until a second is over.
            while time.monotonic() - began_s < self._settings.period_s and not ended.wait(
                min(_LOOK_S, self._settings.period_s)
            ):
                if self._readers and all(reader.is_closed for reader in self._readers.values()):
                    break
                if any(reader.is_half_full for reader in self._readers.values()):
                    self._take_all()
                    if not self._readers:
                        break
        else:
            self.tick()
        self.close()

    def tick(self) -> int:
        """Take what has come; spans that were taken."""
        before = self._rows
        for path in sorted(self._rings.glob("*.ring")):
            if path not in self._readers:
                with contextlib.suppress(OSError, ValueError):  # gone again, or of another version
                    self._readers[path] = RingReader(path)
        self._take_all()
        self._samples += self._counters.sample()
        now_s = self._clock_s()
        if self._rows >= self._settings.part_rows or now_s - self._part_began_s >= self._settings.part_s:
            self.close_part()
            self._guarded(0, lambda: merge_small_parts(self._folder, self._host))
            self._guarded(0, lambda: prune(self._folder, self._host, self._settings, now_s))
        if self._uploads is not None and self._uploads.problem:
            self._say(f"spans cannot be sent to {self._uploads.problem}")
        return self._rows - before

    def _take_all(self) -> None:
        """Bring into safety what is new in the rings that are known."""
        before = self._rows
        self._follow_clock()
        # Before they are taken: of ranks that were killed, what they were in goes with their rings.
        self._guarded(0, lambda: self._still.look(self._readers.values()))
        ended = [path for path, reader in self._readers.items() if self._take(path, reader)]
        if self._rows > before:
            self._still.moved(self._readers.values())
        if self._stream is not None and self._rows > before and not self._guarded(0, self._flush):
            self._tear_stream()
        for reader in self._readers.values():
            reader.keep_place()
        for path in ended:  # only now that all of it is in safety
            self._readers.pop(path).remove()
            self._died.discard(path)

    def close_part(self, *, is_last: bool = False) -> None:
        """Turn what was appended since the last call into Parquet and sums; the stream begins anew.

        What a full disk does not take is tried again with the next part, while memory has room for it.
        """
        self._part_began_s = self._clock_s()
        samples, self._samples, rows = self._samples, [], self._rows
        lost = {"host": self._host, "step": 0, "end_ns": time.time_ns(), "gpu": -1, "name": "spans_dropped_total"}
        if samples:
            counters = pa.Table.from_pylist([*samples, {**lost, "value": self.dropped}], schema=COUNTERS)
            part = ("counters", self._host, counters, 0, self._number)
            self._guarded(0, lambda: write_part(self._folder, *part))
        is_kept = True
        if self._batches:
            table = pa.Table.from_batches(self._batches, schema=SPANS)
            is_kept = self._guarded(0, lambda: self._keep_spans(table, self._number))
            if not is_kept:
                self._remove_parts(self._number)
                if not is_last and rows < self._settings.part_rows:
                    return
                self.dropped += rows
                self._say()
        self._batches, self._rows = [], 0
        if self.dropped > self._noted_dropped:
            with contextlib.suppress(OSError):  # what is not noted now is with the next part
                note_dropped(self._folder, self._host, self.dropped - self._noted_dropped)
                self._noted_dropped = self.dropped
        self._end_stream()
        if is_kept:
            with contextlib.suppress(OSError):
                self._live.unlink(missing_ok=True)  # its rows lie in Parquet now
        self._begin_part()

    def close(self) -> None:
        """Keep what was taken; no more is taken."""
        self.close_part(is_last=True)
        self._clock.close()
        if self._uploads is not None:
            self._uploads.close(_SEND_S)
        if self._presence is not None:
            with contextlib.suppress(OSError):
                self._presence_path.unlink(missing_ok=True)
            self._presence.close()

    def _announce(self) -> None:
        """Hold a lock for as long as this process writes: between two spans there is no other sign that a run lives.

        A file of its own, as streams have: containers that share a folder may all have the same name as hosts.
        """
        live = self._folder / "live"
        live.mkdir(parents=True, exist_ok=True)
        for left in live.glob(f"{self._host}-*{WRITER}"):  # by writers that were killed
            with contextlib.suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        path = live / f"{self._host}-{self._number}{WRITER}"
        beside = path.with_suffix(".new")
        self._presence = beside.open("wb")
        fcntl.flock(self._presence, fcntl.LOCK_EX)
        beside.rename(path)  # it is there only when it is held
        self._presence_path = path

    def _begin_sending(self, remote: RemotePath | None, keeps: bool) -> SpanUploads | None:
        if remote is None:
            return None
        from phalanx.telemetry.span_uploads import SpanUploads

        def prune_there() -> None:
            prune(cast(Path, remote), self._host, self._settings, self._clock_s())

        run = self._folder.parent if keeps else None  # a spool is nobody's run folder
        return SpanUploads(self._folder, remote, self._host, keeps=keeps, run=run, prune=prune_there)

    def _follow_clock(self) -> None:
        for reader in self._readers.values():
            self._unix_offsets_ns.setdefault(reader.attempt, reader.unix_offset_ns)
        newest = max((reader.attempt for reader in self._readers.values()), default=None)
        if newest is not None:
            is_reference = any(one.rank == 0 and one.attempt == newest for one in self._readers.values())
            self._clock.follow(newest, self._unix_offsets_ns[newest], is_reference=is_reference)

    def _begin_part(self) -> None:
        self._number = time.time_ns()  # not by the process: in containers all have the same
        self._live = self._folder / "live" / f"{self._host}-{self._number}.arrows"
        self._is_torn = False

    def _remove_parts(self, number: int) -> None:
        """Sums without their spans would count twice once they are all written."""
        for table in ("phases", "steps", "spans"):
            for part in parts(self._folder, table, self._host):
                if part.stream == (self._host, number):
                    with contextlib.suppress(OSError):
                        part.path.unlink(missing_ok=True)

    def _guarded(self, rows: int, write: Callable[[], object]) -> bool:
        """Write; what the disk does not take is counted as dropped, and said where ranks look. Whether it was taken."""
        try:
            write()
        except OSError as error:
            self.dropped += rows
            self._say(f"spans cannot be written ({error.strerror or error})")
            return False
        return True

    def _say(self, problem: str = "") -> None:
        """Leave in memory what ranks are to know; see `phalanx.telemetry.writer_place.WriterPlace.state`."""
        self._problem = problem or self._problem
        with contextlib.suppress(OSError):
            write_json(self._rings / STATE, {"dropped": self.dropped, "problem": self._problem})

    def _keep_spans(self, spans: pa.Table, number: int) -> None:
        spans = spans.unify_dictionaries()
        tables = []
        attempts = spans["attempt"].unique().to_pylist()
        for attempt in attempts:
            own = spans if len(attempts) == 1 else spans.filter(pa.compute.equal(spans["attempt"], attempt))
            own = own.sort_by([("rank", "ascending"), ("start_ns", "ascending")])
            phases, steps = sums(own)
            tables += [(0, "phases", phases, attempt), (0, "steps", steps, attempt), (1, "spans", own, attempt)]
        for _, table, rows, attempt in sorted(tables, key=lambda one: one[0]):  # with spans the stream is done
            write_part(self._folder, table, self._host, rows, attempt, number)

    def _take(self, path: Path, reader: RingReader) -> bool:
        """Take what is new in a ring; whether nothing more can come from it."""
        gone = reader.is_orphan  # asked first: what its rank wrote before it went is in the ring
        state = reader.read()
        if state.dropped:
            self.dropped += state.dropped
            self._say()
        if gone and not reader.is_closed and path not in self._died:
            self._died.add(path)
            self._note_death(reader)
        if len(state.records):
            types = reader.types()
            self._guarded(0, lambda: self._note_groups(path, reader))
            batch = span_batch(
                state.records,
                types,
                self._names,
                host=self._host,
                rank=reader.rank,
                attempt=reader.attempt,
                unix_offset_ns=self._unix_offsets_ns[reader.attempt],
            )
            self._append(batch, reader)
        return state.is_closed or (gone and not len(state.records))

    def _append(self, batch: pa.RecordBatch, reader: RingReader) -> None:
        """Add to what is made durable now, and to what becomes Parquet later.

        How far the ring was read lies in the batch itself: whoever finds the stream has both or neither.
        """
        place = {"ring": reader.path.name, "opened_unix_ns": str(reader.opened_unix_ns), "taken": str(reader.taken)}
        self._batches.append(batch)
        self._rows += batch.num_rows

        def write() -> None:
            if self._is_torn:
                return
            if self._stream is None:
                self._live.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._live.open("wb")
                fcntl.flock(self._file, fcntl.LOCK_EX)
                self._stream = pa.ipc.new_stream(self._file, SPANS)
            self._stream.write_batch(batch, custom_metadata=place)

        if not self._guarded(0, write):
            self._tear_stream()

    def _flush(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def _tear_stream(self) -> None:
        """There may be half a batch at its end: what comes until the next part is kept in memory alone."""
        self._end_stream()
        self._is_torn = True

    def _end_stream(self) -> None:
        """Append no more; what is in it can still be read."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._stream is not None:
                self._stream.close()
        with contextlib.suppress(OSError):
            self._file.close()
        self._stream = self._file = None

    def _note_death(self, reader: RingReader) -> None:
        """That a rank ended without closing its ring: who waits for it can be told from it."""
        where = {"rank": reader.rank, "host": self._host, "attempt": reader.attempt}
        with contextlib.suppress(OSError):
            note_incident(self._folder, DIED, time.time_ns(), **where)

    def _note_groups(self, path: Path, reader: RingReader) -> None:
        """Who is in which group, once: the lattice of ranks is drawn from it."""
        types = reader.types()
        known = self._described.get(path, 0)
        if len(types) == known:
            return
        lines = [
            json.dumps({"rank": reader.rank, "attempt": reader.attempt, "group": one.group, "ranks": one.ranks})
            for one in types[known:]
            if one.ranks
        ]
        if lines:
            file = self._folder / "groups" / f"{self._host}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as stream:
                stream.write("\n".join(dict.fromkeys(lines)) + "\n")
        self._described[path] = len(types)

    def _take_over(self) -> None:
        """Streams that a writer of this host left when it was killed become Parquet now."""
        for path in sorted((self._folder / "live").glob(f"{self._host}-*.arrows")):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # its writer lives
                self._go_on_behind(path)
                stream = stream_of(path)
                done = any(part.stream == stream for part in parts(self._folder, "spans", self._host))
                if not done and (batches := list(read_live(path))):
                    self._keep_spans(pa.Table.from_batches(batches, schema=SPANS), stream[1])
                path.unlink(missing_ok=True)

    def _go_on_behind(self, stream: Path) -> None:
        """Rings are read from where a stream ends, so that no span is taken twice."""
        for name, (opened_unix_ns, taken) in live_places(stream).items():
            with contextlib.suppress(OSError, ValueError):  # it is gone: all of it was taken
                reader = RingReader(self._rings / name)
                if reader.opened_unix_ns == opened_unix_ns:
                    reader.go_on_from(taken)
                reader.close()


def prune(folder: Path, host: str, settings: WriterSettings, now_s: float) -> None:
    """Let spans of a host go that are old, or too many; those around incidents are the last to go.

    Args:
        folder: of telemetry, also in object storage.
        now_s: Unix seconds.
    """
    kept = incidents(folder)
    around_ms = settings.around_s * 1e3
    old_ms = (now_s - settings.detail_s) * 1e3
    held: list[tuple[bool, int, Path, int]] = []
    for part in parts(folder, "spans", host):
        of_incident = any(part.from_ms - around_ms <= at_ms <= part.to_ms + around_ms for at_ms in kept)
        if part.to_ms < old_ms and not of_incident:
            part.path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                held.append((of_incident, part.to_ms, part.path, part.path.stat().st_size))
    too_much = sum(size for *_, size in held) - settings.most_bytes
    for _, _, path, size in sorted(held):
        if too_much <= 0:
            break
        path.unlink(missing_ok=True)
        too_much -= size


def incidents(folder: Path) -> list[float]:
    """When something went wrong, Unix milliseconds; spans around it are kept."""
    found = []
    for path in (folder / "incidents.jsonl", *folder.glob("incidents/*.jsonl")):  # the latter in object storage
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    found.append(json.loads(line)["at_ns"] / 1e6)
    return found


def note_incident(folder: Path, kind: str, at_ns: int, **details: Any) -> None:
    """Note that something went wrong at a Unix time: the spans around it are kept.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"kind": kind, "at_ns": at_ns, **details}) + "\n"
    descriptor = os.open(folder / "incidents.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())  # one call: lines of several processes do not mix
    finally:
        os.close(descriptor)
