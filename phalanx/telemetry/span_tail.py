"""The new spans of a run that goes on: each is read once, and kept only until its step is whole.

Writers append to a stream for about a minute, which then becomes a Parquet part (`phalanx.telemetry.span_store`). A
stream is read from where the last look ended; when it has become a part, what was kept of it is taken from there
instead, so that no span counts twice and none is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phalanx.telemetry.span_store import SPANS, Stream, parts, stream_of

_LATE_STEPS = 20
"""So many steps behind the newest, a step is whole though some rank has said nothing of it."""


@dataclass
class LiveStream:
    """A stream that is being written; whole messages are taken, a torn one at its end stays for the next look."""

    path: Path
    _at: int = 0
    _head: list[bytes] = field(default_factory=list)

    def new_batches(self) -> list[pa.RecordBatch]:
        """What came since the last look.

        Raises:
            FileNotFoundError: it has become a part.
        """
        with self.path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        reader, at, messages = pa.BufferReader(content), 0, list[tuple[str, bytes]]()
        while True:
            try:
                message = pa.ipc.read_message(reader)
            except (EOFError, OSError, pa.ArrowInvalid):
                break
            messages.append((message.type, content[at : reader.tell()]))
            at = reader.tell()
        self._at += at
        found = list[pa.RecordBatch]()
        if any(kind == "record batch" for kind, _ in messages):
            # behind the schema, and the texts that batches name by number, as far as they were known before
            parts = [*self._head, *(content for _, content in messages)]
            found = list(pa.ipc.open_stream(pa.BufferReader(b"".join(parts))))
        self._head += [content for kind, content in messages if kind != "record batch"]
        return found


class SpanTail:
    """Spans of a run's telemetry by whole steps, in order.

    Args:
        folder: ``telemetry`` of the run.
        first_step: earlier ones are left out; None: all but the newest `most_steps` that are there at the first look.
        most_steps: see `first_step`.
    """

    def __init__(self, folder: Path, *, first_step: int | None = None, most_steps: int = 200) -> None:
        self._folder, self._most_steps = folder, most_steps
        self._released = None if first_step is None else first_step - 1
        self._streams: dict[Stream, LiveStream] = {}
        self._taken: set[Path] = set()
        self._read_until: dict[str, int] = {}
        self._kept: dict[Stream, list[pa.Table]] = {}
        self._last: dict[int, int] = {}
        self.attempt = 0
        """Of the spans that come; when it rises, the steps of before are done again."""

    def new_steps(self) -> pa.Table | None:
        """All spans of the steps that became whole since the last look; None: there are none."""
        self._take_streams()
        self._take_parts()
        if not self._last:
            return None
        newest = max(self._last.values())
        whole = max(min(self._last.values()), newest - _LATE_STEPS)
        released = self._released if self._released is not None else newest - self._most_steps
        if whole <= released:
            return None
        tables = [table for kept in self._kept.values() for table in kept]
        if not tables:
            return None
        spans = pa.concat_tables(tables).unify_dictionaries()
        step = spans["step"]
        out = spans.filter(pc.and_(pc.greater(step, released), pc.less_equal(step, whole)))
        self._released = whole
        self._each(lambda table: table.filter(pc.greater(table["step"], whole)))
        return out if len(out) else None

    @property
    def kept_rows(self) -> int:
        """Spans in memory, of steps that are not whole yet."""
        return sum(len(table) for kept in self._kept.values() for table in kept)

    def _take_streams(self) -> None:
        for path in sorted((self._folder / "live").glob("*.arrows")):
            name = stream_of(path)
            if name[1] <= self._read_until.get(name[0], -1):
                continue
            live = self._streams.setdefault(name, LiveStream(path))
            try:
                batches = live.new_batches()
            except FileNotFoundError:
                continue
            if batches:
                self._keep(name, pa.Table.from_batches(batches).cast(SPANS))

    def _take_parts(self) -> None:
        listed = parts(self._folder, "spans")
        found = [part for part in listed if part.path not in self._taken]
        self._taken = {part.path for part in listed}
        if self._released is None and found:
            self._released = max(part.last_step for part in found) - self._most_steps
        for part in sorted(found, key=lambda one: (one.attempt, one.number)):
            host, number = part.stream
            # Numbers of a host rise. What is not newer was merged of parts that were read.
            if part.last_number <= self._read_until.get(host, -1) or part.attempt < self.attempt:
                continue
            self._read_until[host] = part.last_number
            every = (*self._streams, *self._kept)
            within = {one for one in every if one[0] == host and number <= one[1] <= part.last_number}
            for one in within:
                self._streams.pop(one, None)
                self._kept.pop(one, None)
            if part.attempt > self.attempt or part.last_step > (self._released or -1):
                try:
                    table = pq.read_table(part.path)
                except (OSError, pa.ArrowException):
                    continue  # damaged, or its time was over
                self._keep((host, number), table.cast(SPANS))

    def _keep(self, name: Stream, table: pa.Table) -> None:
        table = table.filter(pc.greater_equal(table["step"], 0))
        newest = pc.max(table["attempt"]).as_py()
        if newest is None:
            return
        if newest > self.attempt:
            # from its checkpoint on all is done again
            self.attempt = newest
            self._kept.clear()
            self._last.clear()
            self._released = pc.min(table.filter(pc.equal(table["attempt"], newest))["step"]).as_py() - 1
        table = table.filter(pc.equal(table["attempt"], self.attempt))
        ends = table.filter(pc.equal(table["kind"].cast(pa.string()), "step"))
        for rank, step in zip(*_last_of_each(ends), strict=True):
            self._last[rank] = max(self._last.get(rank, -1), step)
        for rank in set(table["rank"].unique().to_pylist()) - self._last.keys():
            self._last[rank] = -1  # it has begun, and ended no step yet
        if self._released is not None:
            table = table.filter(pc.greater(table["step"], self._released))
        if len(table):
            self._kept.setdefault(name, []).append(table)

    def _each(self, change: Callable[[pa.Table], pa.Table]) -> None:
        kept = {name: [left for one in tables if len(left := change(one))] for name, tables in self._kept.items()}
        self._kept = {name: tables for name, tables in kept.items() if tables}


def _last_of_each(ends: pa.Table) -> tuple[list[int], list[int]]:
    ranks, steps = ends["rank"].to_numpy(), ends["step"].to_numpy()
    order = np.lexsort((steps, ranks))
    last = np.flatnonzero(np.diff(ranks[order], append=-1) != 0)
    return ranks[order][last].tolist(), steps[order][last].tolist()


def clock_offsets_ns(folder: Path) -> dict[str, int]:
    """How far each host's clock is ahead of the reference, by its newest estimate; hosts without one are not there."""
    found = {}
    for path in (folder / "clocks").glob("*.jsonl"):
        try:
            lines = path.read_bytes().splitlines()[-2:]
        except OSError:
            continue
        for line in lines:
            try:
                entry = json.loads(line)
                found[str(entry["host"])] = int(entry["offset_ns"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    return found
