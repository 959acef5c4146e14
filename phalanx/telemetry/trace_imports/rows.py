"""Spans of other people's tools on their way into a run folder, where all queries work on them.

An importer adds spans and groups; what they all have in common is done here: which part of communication nothing hid,
sums, and the files.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.telemetry.span_store import SPANS, sums, write_part
from phalanx.telemetry.spans import NONE, Kind

Interval = tuple[int, int]

_BUSY = ("forward", "backward", "optimizer", "snapshot")
_HIDDEN = ("collective", "data")
"""Kinds that may run beside compute, and cost a step only what they stand out."""

ITEM_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
"""By torch's names of types in traces."""

_AXES = {
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "context",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "mesh_pp": "pipeline",
    "mesh_tp": "tensor",
    "mesh_cp": "context",
    "mesh_ep": "expert",
    "mesh_dp_shard": "shard",
    "mesh_fsdp": "shard",
    "mesh_dp_replicate": "replicate",
}


def axis_of(description: str) -> str:
    """The axis that a group of Megatron or of torch's device mesh is along; others keep their names."""
    return _AXES.get(description, description)


@dataclass(frozen=True, slots=True)
class ImportedSpan:
    """A row of `phalanx.telemetry.span_store.SPANS`, of one rank; times are Unix nanoseconds."""

    step: int
    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    group: str = ""
    chunk: int = NONE
    micro_batch: int = NONE
    peer: int = NONE
    num_bytes: int = 0


@dataclass
class ImportedRank:
    """What is known of a rank.

    Attributes:
        host: a name; telemetry lies in a folder of that name.
        spans: as they were recorded, in any order.
        groups: that it is in, with their members in order.
    """

    host: str
    spans: list[ImportedSpan] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)


def write_imported(run: Path, ranks: dict[int, ImportedRank], *, source: str) -> int:
    """Write a run folder.

    Args:
        run: made if absent; must have no telemetry yet.
        ranks: what was read.
        source: what it was read from, for people.

    Returns:
        How many spans it has.

    Raises:
        UserError: there is nothing to write, or telemetry is there already.
    """
    folder = run / "telemetry"
    if folder.exists():
        raise UserError("there is telemetry already", cure="name a new folder", field=str(run))
    if not any(rank.spans for rank in ranks.values()):
        raise UserError("no spans were found", cure="give traces that have operators or collectives", field=source)
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        by_host[_folder_name(ranks[rank].host)].append(rank)
    count = 0
    for number, (host, members) in enumerate(sorted(by_host.items()), 1):
        tables = [_table(host, rank, [*_add_waits(ranks[rank].spans)]) for rank in members if ranks[rank].spans]
        if not tables:
            continue
        spans = pa.concat_tables(tables).unify_dictionaries()
        spans = spans.sort_by([("rank", "ascending"), ("start_ns", "ascending")])
        phases, steps = sums(spans)
        for table, rows in (("spans", spans), ("phases", phases), ("steps", steps)):
            write_part(folder, table, host, rows, 0, number)
        count += len(spans)
        lines = [
            json.dumps({"rank": rank, "attempt": 0, "group": group, "ranks": list(others)}) + "\n"
            for rank in members
            for group, others in sorted(ranks[rank].groups.items())
        ]
        if lines:
            (folder / "groups").mkdir(exist_ok=True)
            with atomic_writer(folder / "groups" / f"{host}.jsonl") as file:
                file.writelines(line.encode() for line in lines)
    with atomic_writer(folder / "imported.json") as file:
        file.write(json.dumps({"source": source, "ranks": len(ranks), "spans": count}).encode())
    return count


def _add_waits(spans: Sequence[ImportedSpan]) -> Iterator[ImportedSpan]:
    """The spans, with a ``wait`` for what of each collective no compute hid; waiting for data counts the same way."""
    busy = union((one.start_ns, one.end_ns) for one in spans if one.kind in _BUSY)
    yield from (one for one in spans if one.kind != "data")
    beside = sorted((one for one in spans if one.kind in _HIDDEN), key=lambda one: (one.start_ns, one.end_ns))
    bare = uncovered([(one.start_ns, one.end_ns) for one in beside], busy)
    for number, start_ns, end_ns in bare:
        one = beside[number]
        kind: Kind = "data" if one.kind == "data" else "wait"
        yield ImportedSpan(one.step, kind, one.name, start_ns, end_ns, one.group, peer=one.peer)


def union(intervals: Iterable[Interval], gap_ns: int = 0) -> list[Interval]:
    """Intervals in order that share nothing; those nearer than `gap_ns` become one."""
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap_ns:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def uncovered(intervals: Sequence[Interval], busy: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """What of each interval lies in none of `busy` and in none of the intervals before it.

    Args:
        intervals: in order of their starts.
        busy: in order, sharing nothing (`union`).

    Yields:
        Number of the interval, start and end.
    """
    until, at = -(1 << 63), 0
    for number, (start, end) in enumerate(intervals):
        begin = max(start, until)
        until = max(until, end)
        while at < len(busy) and busy[at][1] <= begin:
            at += 1
        for busy_start, busy_end in islice(busy, at, None):
            if busy_start >= end or begin >= end:
                break
            if busy_start > begin:
                yield number, begin, busy_start
            begin = max(begin, busy_end)
        if begin < end:
            yield number, begin, end


def _folder_name(host: str) -> str:
    """A host's name as a trace gives it, which may be anything, as one that stays within the run."""
    return re.sub(r"[^\w.-]", "_", host)[:100].lstrip(".") or "unknown"


def _table(host: str, rank: int, spans: Sequence[ImportedSpan]) -> pa.Table:
    count = len(spans)
    columns = {
        "host": [host] * count,
        "attempt": np.zeros(count, np.int32),
        "rank": np.full(count, rank, np.int32),
        "bytes": [one.num_bytes for one in spans],
    }
    for name in ("step", "kind", "name", "group", "chunk", "micro_batch", "peer", "start_ns", "end_ns"):
        columns[name] = [getattr(one, name) for one in spans]
    arrays = []
    for one in SPANS:
        is_text = pa.types.is_dictionary(one.type)
        array = pa.array(columns[one.name], pa.string() if is_text else one.type)
        arrays.append(array.dictionary_encode() if is_text else array)
    return pa.table(arrays, schema=SPANS)
