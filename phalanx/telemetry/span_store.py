"""Where spans lie: Arrow streams that are being written, Parquet files of what is done, and sums kept for good.

    RUN/telemetry/
      live/HOST-N.arrows              an Arrow IPC stream, appended at least once a second: the last minute
      live/HOST-N.writer              locked while the process of that host writes
      spans/HOST/PART.parquet         every span, kept for some time and around incidents
      phases/HOST/PART.parquet        sums of a rank and step by type of span, kept for good
      steps/HOST/PART.parquet         sums of a rank and step by kind: a row each, kept for good; heat maps read these
      counters/HOST/PART.parquet      the host's own counters, once a second
      groups/HOST.jsonl, clocks/HOST.jsonl, dropped/HOST.jsonl, incidents.jsonl

A PART is named by what is in it, ``aATTEMPT-sFIRST-sLAST-tFROM-tTO-rFIRST-rLAST-N`` (steps, Unix milliseconds, ranks),
so that a reader opens only what it asks for: with 12,288 ranks the footers alone would take seconds. Sums of one rank
and step may lie in two files, where it was under way when one was closed: readers add them up. A stream becomes the
parts of the same N, those of ``spans`` last: as long as there are none, the stream counts, and then they do.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.core.files import atomic_writer
from phalanx.telemetry.spans import KINDS, NONE, Kind, SpanType

_TEXT = pa.dictionary(pa.int32(), pa.string())

_OF_RANK = [("host", _TEXT), ("attempt", pa.int32()), ("rank", pa.int32()), ("step", pa.int64())]
_OF_TYPE = [*_OF_RANK, ("kind", _TEXT), ("name", _TEXT), ("group", _TEXT), ("chunk", pa.int16())]

SPANS = pa.schema(
    [
        *_OF_TYPE,
        ("micro_batch", pa.int16()),
        ("peer", pa.int32()),
        ("bytes", pa.int64()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
    ]
)
"""Times are Unix nanoseconds by the clock of the span's host; `clocks` says how far hosts are apart."""

PHASES = pa.schema(
    [
        *_OF_TYPE,
        ("count", pa.int32()),
        ("total_ns", pa.int64()),
        ("longest_ns", pa.int64()),
        ("first_start_ns", pa.int64()),
        ("bytes", pa.int64()),
    ]
)

STEPS = pa.schema(
    [
        *_OF_RANK,
        ("end_ns", pa.int64()),
        *((f"{kind}_ns", pa.int64()) for kind in KINDS),
    ]
)
"""A row for each rank and step: time by kind of span, and when its last span ended.

What lies inside another span of a step's parts counts once, for the inner one: ``forward_ns`` is without the ``wait``
for a tensor-parallel all-reduce in it. So parts of a step add up, and a rank that waits is not one that is slow.
"""

PARTS: tuple[Kind, ...] = ("data", "forward", "backward", "wait", "optimizer", "snapshot")
"""Kinds that a step is made of; what is in none of them is the time between spans."""

PARQUET: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "row_group_size": 1 << 17}

# Of sums a minute makes few rows where steps are long: what a file has besides them would be most of it.
_SUMS: dict[str, Any] = PARQUET | {
    "store_schema": False,
    "write_statistics": ["step"],
    "use_dictionary": ["host", "kind", "name", "group"],
}

_UNSAID = (0, 0, 0, 0, 0, 0, 1 << 31)  # parts of earlier versions do not say their ranks

_PARQUET_END = b"PAR1"

_PART = re.compile(r"a(\d+)-s(-?\d+)-s(-?\d+)-t(\d+)-t(\d+)(?:-r(\d+)-r(\d+))?-(\d+)(?:-(\d+))?\.parquet")


@dataclass(frozen=True)
class Part:
    """A Parquet file, by its name: attempt, steps, Unix milliseconds and ranks from the first to the last in it."""

    path: Path
    attempt: int
    first_step: int
    last_step: int
    from_ms: int
    to_ms: int
    first_rank: int
    last_rank: int
    number: int
    last_number: int  # above `number`: it holds all parts from `number` to this one

    @property
    def stream(self) -> Stream:
        """What it has become of."""
        return self.path.parent.name, self.number

    @classmethod
    def of(cls, path: Path) -> Part | None:
        """What the name says; None: it is some other file."""
        found = _PART.fullmatch(path.name)
        if found is None:
            return None
        # the last number of a part that was not merged is its own
        unsaid = (*_UNSAID, 0, found.group(8))
        return cls(path, *(int(found.group(n) or unsaid[n - 1]) for n in range(1, 10)))

    def replaces(self, other: Part) -> bool:
        """Whether `other`, of the same host and table, is in this one (`phalanx.telemetry.part_merging`)."""
        return (
            self.attempt == other.attempt
            and self.number <= other.number
            and other.last_number <= self.last_number
            and (self.number, self.last_number) != (other.number, other.last_number)
            # a host whose clock was set back may give a number twice, and not with the same steps
            and self.first_step <= other.first_step
            and other.last_step <= self.last_step
        )


def parts(folder: Path, table: str, host: str | None = None, *, replaced: bool = False) -> list[Part]:
    """The parts of a table, of one host or of all; `replaced`: also those that lie in a merged one, too."""
    if getattr(folder, "fs", None) is not None:  # object storage: `phalanx.telemetry.remote_path`
        by_host: dict[str, list[Path]] = {}
        for path in (folder / table).glob("*/*.parquet" if host is None else f"{host}/*.parquet"):
            by_host.setdefault(path.parent.name, []).append(path)
        paths: Iterable[list[Path]] = by_host.values()
    else:
        hosts = _entries(str(folder / table)) if host is None else [str(folder / table / host)]
        paths = ([Path(path) for path in _entries(own) if path.endswith(".parquet")] for own in hosts)
    found = []
    for own in paths:
        of_host = [part for part in map(Part.of, own) if part is not None]
        merged = [] if replaced else [part for part in of_host if part.last_number > part.number]
        found += [part for part in of_host if not any(one.replaces(part) for one in merged)] if merged else of_host
    return found


def _entries(folder: str) -> list[str]:
    """What lies in a folder, in order; with thousands of hosts globbing would take longer than reading."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries)
    except PermissionError:
        raise
    except OSError:  # it is not there, or no folder
        return []


def is_whole(path: Path) -> bool:
    """Whether a part begins and ends as Parquet does: a disk that filled up or lost power may have cut it off."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            end = file.read()
            file.seek(0)
            is_enclosed = len(end) == 8 and end[4:] == file.read(4) == _PARQUET_END
            return is_enclosed and int.from_bytes(end[:4], "little") + 12 <= size
    except (FileNotFoundError, IsADirectoryError):  # its time was over meanwhile, or somebody made a folder
        return False


def write_part(
    folder: Path, table: str, host: str, rows: pa.Table, attempt: int, number: int, last_number: int | None = None
) -> Path:
    """Write rows as a part, all at once, which replaces those from `number` to `last_number`; returns its path."""
    steps, ends = (
        rows.column(name).to_numpy()
        for name in ("step", "end_ns" if "end_ns" in rows.column_names else "first_start_ns")
    )
    name = f"a{attempt}-s{steps.min()}-s{steps.max()}-t{ends.min() // 10**6}-t{ends.max() // 10**6}"
    if "rank" in rows.column_names:
        ranks = rows.column("rank").to_numpy()
        name += f"-r{ranks.min()}-r{ranks.max()}"
    until = "" if last_number is None else f"-{last_number}"
    path = folder / table / host / f"{name}-{number}{until}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        pq.write_table(rows, file, **(_SUMS if table in ("phases", "steps") else PARQUET))
    return path


class Names:
    """Texts by number, the same in all batches of a stream, which sends its dictionary again only when it grows."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._array = pa.array([], pa.string())

    def number(self, text: str) -> int:
        """Its number, a new one if need be."""
        return self._numbers.setdefault(text, len(self._numbers))

    def column(self, numbers: np.ndarray) -> pa.DictionaryArray:
        """A column of texts, by their numbers."""
        if len(self._array) < len(self._numbers):
            self._array = pa.array(list(self._numbers), pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), self._array)


def span_batch(
    records: np.ndarray,
    types: Sequence[SpanType],
    names: Names,
    *,
    host: str,
    rank: int,
    attempt: int,
    unix_offset_ns: int,
) -> pa.RecordBatch:
    """Records of a ring (`phalanx.telemetry.spans.RECORD_DTYPE`) as rows of `SPANS`."""
    known = [*types, SpanType(NONE, "user", "not described")]
    which = np.where(records["type"] < len(types), records["type"], len(types))

    def text(attribute: str) -> pa.DictionaryArray:
        numbers = np.array([names.number(getattr(one, attribute)) for one in known], np.int32)
        return names.column(numbers[which])

    count = len(records)
    columns = [
        names.column(np.full(count, names.number(host), np.int32)),
        np.full(count, attempt, np.int32),
        np.full(count, rank, np.int32),
        records["step"],
        text("kind"),
        text("name"),
        text("group"),
        np.array([one.chunk for one in known], np.int16)[which],
        records["micro_batch"],
        records["peer"],
        records["bytes"],
        records["start_ns"] + unix_offset_ns,
        records["end_ns"] + unix_offset_ns,
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SPANS)


def sums(spans: pa.Table) -> tuple[pa.Table, pa.Table]:
    """What is kept of spans for good: sums by rank, step and type (`PHASES`), and by rank, step and kind (`STEPS`)."""
    spans = spans.unify_dictionaries().combine_chunks()
    texts = {name: _codes(spans[name]) for name in ("host", "kind", "name", "group")}
    chunk, attempt, rank, step = (spans[name].to_numpy() for name in ("chunk", "attempt", "rank", "step"))
    series, _ = row_numbers(*(numbers for numbers, _ in texts.values()), chunk, attempt)
    keys, first = row_numbers(rank, step, series)
    count = len(first)
    start_ns, end_ns = (spans[name].to_numpy() for name in ("start_ns", "end_ns"))
    length_ns = end_ns - start_ns
    columns: dict[str, pa.Array | np.ndarray] = {
        name: pa.DictionaryArray.from_arrays(pa.array(numbers[first], pa.int32()), dictionary)
        for name, (numbers, dictionary) in texts.items()
    }
    columns |= {
        "attempt": attempt[first],
        "rank": rank[first],
        "step": step[first],
        "chunk": chunk[first],
        "count": np.bincount(keys, minlength=count).astype(np.int32),
        "total_ns": _summed(keys, length_ns, count),
        "longest_ns": _extreme(np.maximum, keys, length_ns, count),
        "first_start_ns": _extreme(np.minimum, keys, start_ns, count),
        "bytes": _summed(keys, spans["bytes"].to_numpy(), count),
    }
    phases = pa.table([columns[name] for name in PHASES.names], schema=PHASES)
    own_ns = length_ns - _inner_ns(texts["kind"], rank, start_ns, end_ns)
    own_ns = _summed(keys, np.maximum(own_ns, 0), count)
    return phases, _by_kind(phases, own_ns, _extreme(np.maximum, keys, end_ns, count))


def _inner_ns(
    kinds: tuple[np.ndarray, pa.Array], rank: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray
) -> np.ndarray:
    """For each span, the time of the spans of `PARTS` that lie directly inside it, where it is one of those itself."""
    inner_ns = np.zeros(len(rank), np.int64)
    is_part = np.isin(kinds[0], [at for at, kind in enumerate(kinds[1].to_pylist()) if kind in PARTS])
    rows = np.flatnonzero(is_part)
    if not len(rows):
        return inner_ns
    later_ns, later_end_ns = np.diff(start_ns[rows]), np.diff(end_ns[rows])
    in_order = (later_ns > 0) | ((later_ns == 0) & (later_end_ns <= 0))
    later_rank = np.diff(rank[rows])
    if not (
        (later_rank > 0) | ((later_rank == 0) & in_order)
    ).all():  # those of a writer are sorted, which is most of the cost
        rows = rows[np.lexsort((-end_ns[rows], start_ns[rows], rank[rows]))]
    rank, start_ns, end_ns = rank[rows], start_ns[rows], end_ns[rows]
    first = np.maximum.accumulate(np.where(np.diff(rank, prepend=rank[0] - 1) != 0, np.arange(len(rows)), 0))
    # What encloses a span is the nearest one before it that ends no earlier. All spans between a span and its candidate
    # end before it does, so that a candidate which ends too early hands over its own: a few rounds settle all.
    outer = np.arange(len(rows)) - 1
    outer[outer < first] = NONE
    while len(early := np.flatnonzero((outer >= 0) & (end_ns[outer] < end_ns))):
        outer[early] = outer[outer[early]]
    is_inside = outer >= 0
    inner_ns[rows] = _summed(outer[is_inside], (end_ns - start_ns)[is_inside], len(rows))
    return inner_ns


def _by_kind(phases: pa.Table, own_ns: np.ndarray, ends_ns: np.ndarray) -> pa.Table:
    kinds, names = _codes(phases["kind"])
    order = {kind: number for number, kind in enumerate(KINDS)}
    kinds = np.array([order.get(text, order["user"]) for text in names.to_pylist()], np.int64)[kinds]
    attempt, rank, step = (phases[name].to_numpy() for name in ("attempt", "rank", "step"))
    keys, first = row_numbers(attempt, rank, step)
    count = len(first)
    by_kind_ns = _summed(keys * len(KINDS) + kinds, own_ns, count * len(KINDS))
    host = phases["host"].combine_chunks().take(pa.array(first)) if count else phases["host"]
    rows = [host, attempt[first], rank[first], step[first], _extreme(np.maximum, keys, ends_ns, count)]
    return pa.table([*rows, *by_kind_ns.reshape(count, len(KINDS)).T], schema=STEPS)


def row_numbers(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A number from 0 on for each row, the same where all columns are; and the first row of each number.

    Spans of a rank come in the order of steps, so that numbers without gaps are few: sorting is not needed.
    """
    keys, cells = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low = int(column.min(initial=0))
        width = int(column.max(initial=0)) - low + 1
        if cells * width > 1 << 60:
            _, keys = np.unique(keys, return_inverse=True)
            cells = int(keys.max(initial=0)) + 1
        keys, cells = keys * width + (column - low), cells * width
    if cells > max(1 << 16, 8 * len(keys)):
        _, first, keys = np.unique(keys, return_index=True, return_inverse=True)
        return keys, first
    is_there = np.zeros(cells, bool)
    is_there[keys] = True
    numbers = np.cumsum(is_there) - 1
    keys = numbers[keys]
    first = np.zeros(int(is_there.sum()), np.int64)
    first[keys[::-1]] = np.arange(len(keys) - 1, -1, -1)
    return keys, first


def _summed(keys: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Sums by key; exact up to 2^53 (a step of a hundred days, in nanoseconds)."""
    return np.bincount(keys, values, count).astype(np.int64)


def _extreme(ufunc: np.ufunc, keys: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    found = np.full(count, np.iinfo(np.int64).min if ufunc is np.maximum else np.iinfo(np.int64).max)
    ufunc.at(found, keys, values)
    return found


def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Numbers of a column of texts, and the texts."""
    if not column.num_chunks or not len(column):
        return np.zeros(0, np.int64), pa.array([], pa.string())
    array = column.unify_dictionaries().combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    return array.indices.to_numpy().astype(np.int64), array.dictionary


def read_live(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of a stream that is being written, or was when its writer was killed: the last may be torn.

    Raises:
        FileNotFoundError: it is not there.
    """
    return (batch for batch, _ in _read_stream(path))


def live_places(path: Path) -> dict[str, tuple[int, int]]:
    """How far each ring had been read when the last whole batch of a stream was written.

    Returns:
        By the name of the ring: when it was opened, which tells it from another of this name, and the records taken.

    Raises:
        FileNotFoundError: it is not there.
    """
    found = {}
    for _, metadata in _read_stream(path):
        if metadata is not None and b"ring" in metadata:
            place = int(metadata[b"opened_unix_ns"]), int(metadata[b"taken"])
            found[metadata[b"ring"].decode()] = place
    return found


def _read_stream(path: Path) -> Iterator[tuple[pa.RecordBatch, Mapping[bytes, bytes] | None]]:
    content = io.BytesIO(path.read_bytes())
    try:
        reader = pa.ipc.open_stream(content)
        while True:
            yield reader.read_next_batch_with_custom_metadata()
    except (StopIteration, pa.ArrowInvalid, OSError, EOFError):
        return


Stream = tuple[str, int]
"""The host and the N of a stream."""


def stream_of(path: Path) -> Stream:
    """Which stream a file is."""
    host, _, number = path.stem.rpartition("-")
    return host, int(number) if number.isdigit() else NONE


def read_streams(folder: Path) -> tuple[pa.Table, set[Stream]]:
    """All spans of streams that lie in no Parquet file yet, and which streams these are.

    Parts of the same numbers, which may be there already or come any moment, are not to be read as well.
    """
    paths = sorted((folder / "live").glob("*.arrows"))
    done = {part.stream for part in parts(folder, "spans")} if paths else set()
    batches: list[pa.RecordBatch] = []
    streams = set()
    for path in paths:
        if (stream := stream_of(path)) not in done:
            with contextlib.suppress(FileNotFoundError):  # it has become parts meanwhile
                batches += read_live(path)
                streams.add(stream)
    return pa.Table.from_batches(batches, schema=SPANS).unify_dictionaries(), streams


def live_spans(folder: Path) -> pa.Table:
    """All spans that lie in no Parquet file yet."""
    return read_streams(folder)[0]
