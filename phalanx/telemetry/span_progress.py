"""How far a loop of somebody's own is, by its spans: it keeps no figures, and its steps are known all the same.

Of a run of many hosts one is asked: all are at the same step, but for one or two.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

_USUAL_STEPS, _MOST_PARTS = 50, 3
_MOST_LIVE_BYTES = 64 << 20


class SpanProgress(NamedTuple):
    """None: not known.

    Attributes:
        step: the newest that has ended.
        step_s: a usual one of the newest, seconds.
        written: when spans were last written, seconds since 1970.
    """

    step: int | None
    step_s: float | None
    written: float | None


def span_progress(telemetry: Path) -> SpanProgress:
    """What the newest spans of one host say; files that cannot be read are left out.

    Args:
        telemetry: the folder of this name in that of the run.
    """
    import pyarrow as pa  # takes a while, and most runs keep figures

    from phalanx.telemetry.span_store import parts, read_live

    lengths_ns: deque[tuple[int, int]] = deque(maxlen=_USUAL_STEPS)
    written = 0.0
    closed = parts(telemetry, "steps")
    attempt = max((part.attempt for part in closed), default=-1)
    newest = sorted((part for part in closed if part.attempt == attempt), key=lambda one: (one.last_step, one.to_ms))
    if newest:
        written = newest[-1].to_ms / 1000
        for part in [one for one in newest if one.stream[0] == newest[-1].stream[0]][-_MOST_PARTS:]:
            with suppress(OSError, pa.ArrowException):
                lengths_ns += _of_part(part.path)
    for path in sorted((telemetry / "live").glob("*.arrows"))[:1]:
        with suppress(OSError, pa.ArrowException):
            found = path.stat()
            written = max(written, found.st_mtime)
            if found.st_size <= _MOST_LIVE_BYTES:
                for batch in read_live(path):
                    lengths_ns += _of_batch(batch, attempt)
    if not lengths_ns:
        return SpanProgress(None, None, written or None)
    step_s = median(length_ns for _, length_ns in lengths_ns) * 1e-9
    return SpanProgress(max(step for step, _ in lengths_ns), step_s, written or None)


def _of_part(path: Path) -> list[tuple[int, int]]:
    """Number and nanoseconds of the newest steps of its first rank."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["rank", "step", "step_ns"], partitioning=None).to_pydict()
    ranks = {rank for rank, length_ns in zip(table["rank"], table["step_ns"], strict=True) if length_ns}
    rows = zip(table["rank"], table["step"], table["step_ns"], strict=True)
    first = min(ranks, default=0)
    return sorted((step, length_ns) for rank, step, length_ns in rows if rank == first and length_ns)[-_USUAL_STEPS:]


def _of_batch(batch: object, least_attempt: int) -> list[tuple[int, int]]:
    """The same of spans of a batch that is being written."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = pa.Table.from_batches([batch])
    is_step = pc.equal(table["kind"].cast(pa.string()), "step")
    rows = table.filter(pc.and_(is_step, pc.greater_equal(table["attempt"], least_attempt)))
    if not len(rows):
        return []
    rows = rows.filter(pc.equal(rows["rank"], pc.min(rows["rank"])))
    steps, starts, ends = (rows[name].to_pylist() for name in ("step", "start_ns", "end_ns"))
    return [(step, end - start) for step, start, end in zip(steps, starts, ends, strict=True)][-_USUAL_STEPS:]
