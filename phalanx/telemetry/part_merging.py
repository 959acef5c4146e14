"""Small files of sums become larger ones: to open a file costs a reader as much as thousands of rows.

A host closes a part every minute, which holds a few kilobytes of sums where steps are long: a heat map of 100 steps of
6 s on 12,288 ranks would open 15,000 files. So small parts of `TABLES` are merged, the oldest first, until they have
`SMALL_BYTES`. The name of a merged part says which it replaces; readers leave those out, and they are removed the next
time, when whoever was reading them has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.telemetry.span_store import Part, parts, write_part

TABLES = ("steps", "phases")
SMALL_BYTES = 512 << 10
LEAST_PARTS = 3


def merge_small_parts(folder: Path, host: str, least: int = LEAST_PARTS) -> int:
    """Merge what is small of one host, and remove what was merged before; how many parts became others.

    Args:
        folder: `telemetry` of a run, on this host.
        least: so many small parts of one attempt that follow each other are merged.

    Raises:
        OSError: the folder cannot be written.
    """
    merged = 0
    for table in TABLES:
        current = parts(folder, table, host)
        kept = {part.path for part in current}
        for part in parts(folder, table, host, replaced=True):
            if part.path not in kept:
                part.path.unlink(missing_ok=True)
        for run in _small_runs(current):
            if len(run) >= least:
                merged += _merge(folder, table, host, run)
    return merged


def _small_runs(current: Sequence[Part]) -> list[list[Part]]:
    """Small parts of one attempt that lie between the same larger ones."""
    runs: list[list[Part]] = []
    for part in sorted(current, key=lambda one: (one.attempt, one.number)):
        is_small = _size(part) < SMALL_BYTES
        if not is_small or not runs or (runs[-1] and runs[-1][-1].attempt != part.attempt):
            runs.append([])
        if is_small:
            runs[-1].append(part)
    return runs


def _size(part: Part) -> int:
    try:
        return part.path.stat().st_size
    except FileNotFoundError:  # sent to object storage meanwhile
        return SMALL_BYTES


def _merge(folder: Path, table: str, host: str, run: Sequence[Part]) -> int:
    try:
        rows = pa.concat_tables([pq.read_table(part.path) for part in run]).unify_dictionaries()
    except (pa.ArrowException, FileNotFoundError):  # damaged, or sent away: they stay as they are
        return 0
    rows = rows.sort_by([("rank", "ascending"), ("step", "ascending")])
    last = max(part.last_number for part in run)
    write_part(folder, table, host, rows, run[0].attempt, run[0].number, last)
    return len(run)
