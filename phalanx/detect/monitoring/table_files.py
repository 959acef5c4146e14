"""Tables of monitoring data in Parquet and CSV files, and those of other people in either of two forms.

- *wide*: a row per machine and moment: ``time, machine, cpu_usage, gpu_power_draw, …``
- *long*: a row per value: ``time, machine, metric, value`` and, if machines have several, ``device``

Metrics have names of the catalogue, or names that a file of names knows (DCGM's, node_exporter's); counters become
rates.
Times are seconds, milliseconds or nanoseconds since 1970, told apart by their size, or time stamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.detect.monitoring.metric_alignment import Grid
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_names import Names, RawSeries, load_names, table_by_names
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.repeated_samples import distinct_samples

_TIME = ("time", "timestamp", "ts", "time_s", "unix_s", "end_ns")
_MACHINE = ("machine", "host", "hostname", "instance", "node")
_METRIC = ("metric", "name", "__name__")
_VALUE = ("value",)
_DEVICE = ("device", "gpu", "port", "uuid")
_BLOCK = 256
"""Machines of one row group."""
_MISSING = ["", "NaN", "nan", "null", "NULL", "Null", "NA", "N/A", "n/a", "#N/A", "None", "none", "-"]
"""Cells that stand for no value."""
_LEAST_CELLS, _MOST_CELLS = 20_000_000, 200_000_000
"""Of a table that may be nearly empty; and of one that may have days without samples."""
_MOST_EMPTY = 50
"""Cells of a table for each value that the file holds, where there are many cells: times that are odd make more."""


def write_table(table: MetricTable, path: Path) -> None:
    """Wide Parquet: time in seconds, machine, and a column per metric, null where nothing was measured.

    The file is whole or not there. `read_table` of it gives the same table.
    """
    names = pa.array(list(table.machines))
    times_s = np.round(table.start_s + table.period_s * np.arange(table.samples), 6)
    schema = pa.schema(
        [
            ("time", pa.float64()),
            ("machine", pa.dictionary(pa.int32(), pa.string())),
            *((name, pa.float32()) for name in table.metrics),
        ],
        metadata={"phalanx.period_s": repr(table.period_s)},
    )
    with atomic_writer(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for first in range(0, len(table.machines), _BLOCK):
            machines = np.arange(first, min(first + _BLOCK, len(table.machines)), dtype=np.int32)
            columns: list[Any] = [
                pa.array(np.tile(times_s, len(machines))),
                pa.DictionaryArray.from_arrays(pa.array(np.repeat(machines, table.samples)), names),
            ]
            for row in range(len(table.metrics)):
                flat = table.values[row, machines].reshape(-1)
                columns.append(pa.array(flat, mask=np.isnan(flat)))
            writer.write_table(pa.table(columns, schema=schema))


def read_table(
    path: Path,
    *,
    names: Names | None = None,
    period_s: float | None = None,
    machines: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
) -> MetricTable:
    """A Parquet or CSV file, wide or long.

    Args:
        names: rules for other names than the catalogue's; None: those of the package.
        period_s: of the table; None: the median distance of a machine's samples, those of a second being one where
            they are several at odd distances (two servers that scrape the same hosts).
        machines: rows, in this order; None: all of the file, sorted.
        metrics: of the catalogue; None: all of the file.

    Raises:
        UserError: no such file, or it is of neither form.
    """
    found = _read(path)
    time, machine = _column(found, _TIME, path), _column(found, _MACHINE, path)
    if not len(found):
        raise UserError("has a header and no rows below it", cure="give a file with rows of samples", value=str(path))
    if found[machine].null_count:
        row = pc.index(pc.is_null(found[machine]), True).as_py() + 1
        raise UserError(f"names no machine in row {row}", cure="name it, or leave the row out", value=str(path))
    known_names = names or load_names()
    _refuse_words(found, known_names, path)
    times_s = _seconds(found[time], path)
    hosts = found[machine].cast(pa.string()).combine_chunks().dictionary_encode()
    metric, value = _first(found, _METRIC), _first(found, _VALUE)
    if metric and value:
        raw = _long(found, times_s, hosts, metric, value)
    else:
        others = [name for name in found.column_names if name not in (time, machine) and _is_number(found[name])]
        if plain := _plain_wide(found, times_s, hosts, others, machines, metrics):
            return plain
        raw = _wide(found, times_s, hosts, others)
    if not raw:
        raise UserError("holds no values", cure="give a file with rows of samples", value=str(path))
    raw, usual_s = distinct_samples(raw)
    start_s, end_s = min(one.times_s[0] for one in raw), max(one.times_s[-1] for one in raw)
    grid = Grid.between(start_s, end_s, period_s or usual_s)
    _refuse_odd_times(times_s, grid, raw, path)
    return table_by_names(raw, known_names, grid, machines=machines, metrics=metrics)


def _refuse_words(table: pa.Table, names: Names, path: Path) -> None:
    """A column of a known name that holds words would be left out without a word."""
    series = {name for rules in names.values() for rule in rules for name in (*rule.series, *rule.over)}
    for name in table.column_names:
        column = table[name]
        is_known = name in CATALOGUE or name in series or (name == _first(table, _VALUE) and _first(table, _METRIC))
        if not is_known or _is_number(column) or pa.types.is_boolean(column.type):
            continue
        row, cell = next(
            ((row, cell) for row, cell in enumerate(column.to_pylist(), 1) if cell is not None and not _is_float(cell)),
            (1, column[0].as_py()),
        )
        cure = "give numbers, and empty cells where nothing was measured"
        raise UserError(
            f"column {name} holds {str(cell)[:40]!r} in row {row}, which is no number", cure=cure, value=str(path)
        )


def _is_float(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _refuse_odd_times(times_s: NDArray[np.float64], grid: Grid, raw: Sequence[RawSeries], path: Path) -> None:
    """One time that is far from all others would make a table of years."""
    series = len({(one.machine, one.name) for one in raw})
    cells = grid.samples * series
    held = sum(len(one.times_s) for one in raw)
    if cells <= _LEAST_CELLS or cells <= _MOST_EMPTY * held:
        return
    middle_s = float(np.median(times_s))
    row = int(np.argmax(np.abs(times_s - middle_s)))
    days = abs(float(times_s[row]) - middle_s) / 86_400
    if days < 1:
        raise UserError(
            f"holds {held:,} values, and would be a table of {cells:,} cells, one every {grid.period_s:g} s",
            cure="give samples at regular moments, such as one a second for each machine",
            value=str(path),
        )
    if cells <= _MOST_CELLS:
        return
    raise UserError(
        f"has the time {times_s[row]:.15g} s in row {row + 1}, {days:,.0f} days from the others",
        cure="leave such rows out",
        value=str(path),
    )


def _read(path: Path) -> pa.Table:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError("its name is not UTF-8, and Arrow cannot open it", cure="rename it", value=str(path)) from None
    try:
        if path.suffix.lower() in (".csv", ".gz", ".txt", ".tsv"):
            parse = pyarrow.csv.ParseOptions(delimiter="\t" if ".tsv" in path.suffixes else ",")
            convert = pyarrow.csv.ConvertOptions(null_values=_MISSING, strings_can_be_null=True)
            return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        first = str(error).splitlines()[0]
        cure = "name a Parquet or CSV file (.csv, .csv.gz, .tsv)"
        raise UserError(f"cannot be read ({first})", cure=cure, value=str(path)) from None


def _first(table: pa.Table, names: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in table.column_names}
    return next((by_lower[name] for name in names if name in by_lower), "")


def _column(table: pa.Table, names: Sequence[str], path: Path) -> str:
    if found := _first(table, names):
        return found
    cure = f"name it one of {', '.join(names)} (there are {', '.join(table.column_names[:8])})"
    raise UserError(f"has no column of {names[0]}s", cure=cure, value=str(path))


def _is_number(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_floating(column.type) or pa.types.is_integer(column.type) or pa.types.is_null(column.type))


def _floats(column: Any) -> NDArray[np.float64]:
    return np.asarray(pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False))


def _seconds(column: pa.ChunkedArray, path: Path) -> NDArray[np.float64]:
    """Numbers by their size: 1e9 s, 1e12 ms, 1e15 µs and 1e18 ns since 1970 are all of this time."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _floats(column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())) / 1e6
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        cure = "give seconds since 1970, or time stamps such as 2026-11-25T22:00:00Z"
        raise UserError("has times that are neither numbers nor time stamps", cure=cure, value=str(path))
    times = _floats(column)
    if not np.isfinite(times).all():
        row = int(np.argmin(np.isfinite(times))) + 1
        raise UserError(f"has rows without a time (row {row})", cure="leave them out", value=str(path))
    # The usual size: one odd time is not to change the unit of all.
    usual = float(np.median(np.abs(times))) if len(times) else 0.0
    return times / next((unit for unit in (1e9, 1e6, 1e3) if usual / unit > 1e8), 1.0)


def _plain_wide(
    table: pa.Table,
    times_s: NDArray[np.float64],
    hosts: pa.DictionaryArray,
    columns: Sequence[str],
    machines: Sequence[str] | None,
    metrics: Sequence[str] | None,
) -> MetricTable | None:
    """Where columns have the catalogue's names and all machines the same regular moments, as `write_table` has them."""
    kept = [name for name in CATALOGUE if name in columns and (metrics is None or name in metrics)]
    known = hosts.dictionary.to_pylist()
    if not kept or set(columns) - CATALOGUE.keys() or len(table) % max(1, len(known)):
        return None
    codes = hosts.indices.to_numpy(zero_copy_only=False)
    order = np.lexsort((times_s, codes))
    is_sorted = bool((order[1:] > order[:-1]).all())
    moments = times_s[order].reshape(len(known), -1)
    samples = moments.shape[1]
    if samples < 2 or (np.bincount(codes, minlength=len(known)) != samples).any() or (moments != moments[0]).any():
        return None
    steps_s = np.diff(moments[0])
    if (np.abs(steps_s - steps_s[0]) > 1e-3 * steps_s[0]).any():
        return None
    wanted = list(machines) if machines is not None else sorted(known)
    rows = {name: row for row, name in enumerate(known)}
    values = np.full((len(kept), len(wanted), samples), np.nan, np.float32)
    places = [(place, rows[name]) for place, name in enumerate(wanted) if name in rows]
    if not places:
        raise UserError("there are no samples of these machines", cure=f"there are {', '.join(sorted(known)[:5])}")
    into, of = (np.array(one) for one in zip(*places, strict=True))
    for row, name in enumerate(kept):
        flat = pc.fill_null(table[name].cast(pa.float32()), float("nan")).to_numpy()
        values[row, into] = (flat if is_sorted else flat[order]).reshape(len(known), samples)[of]
    period_s = float(np.round((moments[0, -1] - moments[0, 0]) / (samples - 1), 6))
    return MetricTable(values, tuple(kept), tuple(wanted), float(moments[0, 0]), period_s)


def _wide(
    table: pa.Table, times_s: NDArray[np.float64], hosts: pa.DictionaryArray, columns: Sequence[str]
) -> list[RawSeries]:
    known, codes = hosts.dictionary.to_pylist(), hosts.indices.to_numpy(zero_copy_only=False)
    found = []
    for name in columns:
        values = _floats(table[name])
        found += [
            RawSeries(name, str(known[int(codes[part[0]])]), times_s[part], values[part])
            for part in _groups(times_s, codes)
        ]
    return found


def _long(
    table: pa.Table, times_s: NDArray[np.float64], hosts: pa.DictionaryArray, metric: str, value: str
) -> list[RawSeries]:
    names = table[metric].cast(pa.string()).combine_chunks().dictionary_encode()
    device = _first(table, _DEVICE)
    devices = table[device].cast(pa.string()).fill_null("").combine_chunks().dictionary_encode() if device else None
    of = [hosts, names, *([devices] if devices is not None else [])]
    keys = np.zeros(len(table), np.int64)
    for one in of:
        keys = keys * max(1, len(one.dictionary)) + one.indices.to_numpy(zero_copy_only=False)
    values = _floats(table[value])
    found = []
    for part in _groups(times_s, keys):
        host, name, *rest = (str(one.dictionary[one.indices[int(part[0])].as_py()].as_py()) for one in of)
        found.append(RawSeries(name, host, times_s[part], values[part], rest[0] if rest else ""))
    return found


def _groups(times_s: NDArray[np.float64], keys: NDArray[Any]) -> list[NDArray[np.int64]]:
    """Rows of each key, by time."""
    if len(keys) == 0:
        return []
    order = np.lexsort((times_s, keys))
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
