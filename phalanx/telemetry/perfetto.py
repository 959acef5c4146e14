"""A run as Chrome trace JSON, which Perfetto and chrome://tracing open, and as Kineto-like files, which tools for those
read (HolisticTraceAnalysis).

One file for all ranks: a process for each rank, in it a lane for the step, for compute, for waiting, and for each
group's communication; arrows lead from a send to its receive. Spans that overlap on a lane without one being inside
the other move to a further lane of the same name, since the format cannot show them.

Times are microseconds from the first span (``baseTimeNanoseconds``): Unix time has more digits than a float keeps.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.telemetry.queries import Trace

_LANES = {
    "step": "step",
    "startup": "step",
    "evaluation": "step",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "user": "user",
    "data": "data",
    "snapshot": "checkpoint",
    "persist": "checkpoint",
    "wait": "waiting",
}
_ORDER = ("step", "compute", "waiting", "data", "checkpoint", "user")
_LANES_EACH = 8  # lanes of one name before the numbers of the next name begin

_COMPUTE_STREAM, _FIRST_GROUP_STREAM = 7, 20

_COLUMNS = (
    "rank",
    "host",
    "step",
    "kind",
    "name",
    "group",
    "chunk",
    "micro_batch",
    "peer",
    "bytes",
    "start_ns",
    "end_ns",
)


def export_timeline(
    trace: Trace,
    path: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    ranks: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
) -> int:
    """Write one merged timeline; gzip where `path` ends in ``.gz``.

    Returns:
        How many spans it has.

    Raises:
        UserError: no spans are kept of that, or there is no such group.
    """
    rows = _rows(trace, first, last, ranks, groups)
    base_ns = rows[0]["start_ns"]
    lanes = _lanes_of(rows)
    events = [_slice(row, lane, base_ns) for row, lane in zip(rows, lanes, strict=True)]
    places = {
        (row["rank"], row["group"], row["start_ns"], row["end_ns"], row["peer"]): lane[1]
        for row, lane in zip(rows, lanes, strict=True)
    }
    arrows = list(_arrows(trace.transfers(first, last).to_pylist(), places, base_ns))
    described = _describe(rows, lanes, trace)
    with atomic_writer(path) as file:
        _write(file, path, {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}, [*described, *events, *arrows])
    return len(rows)


def export_per_rank(
    trace: Trace,
    folder: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    ranks: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
) -> dict[int, Path]:
    """Write a file for each rank, ``rank-N.json.gz``, that looks as if Kineto had written it on a GPU.

    Compute becomes kernels of stream 7, each group's communication kernels of a stream of its own whose names begin
    with ``nccl``, a step a ``ProfilerStep#n``; waiting is what tools work out themselves, and stays out.

    Returns:
        The files by rank.

    Raises:
        UserError: no spans are kept of that, or there is no such group.
    """
    rows = _rows(trace, first, last, ranks, groups)
    base_ns = rows[0]["start_ns"]
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_rank[row["rank"]].append(row)
    members = [(one["rank"], one["group"], one["ranks"]) for one in trace.groups().to_pylist()]
    names = sorted({row["group"] for row in rows if row["kind"] == "collective"})
    world = 1 + max((max(ranks_, default=0) for _, _, ranks_ in members), default=max(by_rank))
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for rank, own in sorted(by_rank.items()):
        groups_of_rank = {group: ranks_ for one, group, ranks_ in members if one == rank}
        config = [
            {"pg_name": str(at), "pg_desc": group, "pg_size": len(ranks_), "ranks": ranks_}
            for at, (group, ranks_) in enumerate(sorted(groups_of_rank.items()))
        ]
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "as recorded by spans"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,
        }
        path = folder / f"rank-{rank}.json.gz"
        with atomic_writer(path) as file:
            _write(file, path, head, _kineto_events(own, names, groups_of_rank, base_ns))
        written[rank] = path
    return written


def _rows(
    trace: Trace, first: int | None, last: int | None, ranks: Sequence[int] | None, groups: Sequence[str] | None
) -> list[dict[str, Any]]:
    if groups is not None:
        _check_groups(trace, groups)
    table = trace.timeline(first, last, ranks=ranks, groups=groups).select(list(_COLUMNS))
    if not len(table):
        raise UserError(
            "no spans are kept of these steps and ranks",
            cure="ask for steps of the last minutes or around an incident; `phalanx trace summary` has sums of all",
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _check_groups(trace: Trace, groups: Sequence[str]) -> None:
    known = sorted({one["group"] for one in trace.groups().to_pylist()})
    if not set(groups) <= set(known):  # only now: a large run has thousands of files of sums
        seen = trace.ask('select distinct "group"::varchar as name from all_phases where "group" <> \'\'')
        known = sorted({*known, *seen["name"].to_pylist()})
    for name in groups:
        if name not in known:
            cure = f"give some of {', '.join(known)}" if known else "leave it out: no group of ranks was recorded"
            raise UserError("no such group of ranks in this run", cure=cure, field="groups", value=name)


def _lanes_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """For each row, in order of time, the lane's name and its number within the rank."""
    names = sorted({row["group"] for row in rows if row["kind"] == "collective"})
    first = {name: at * _LANES_EACH for at, name in enumerate([*_ORDER, *names])}
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    lanes = []
    for row in rows:
        name = row["group"] if row["kind"] == "collective" else _LANES[row["kind"]]
        number = first[name]
        while number < first[name] + _LANES_EACH - 1:
            ends_ns = open_ends[row["rank"], number]
            while ends_ns and ends_ns[-1] <= row["start_ns"]:
                ends_ns.pop()
            if not ends_ns or (row["kind"] != "collective" and row["end_ns"] <= ends_ns[-1]):
                break
            number += 1
        open_ends[row["rank"], number].append(row["end_ns"])
        lanes.append((name or "communication", number))
    return lanes


def _slice(row: dict[str, Any], lane: tuple[str, int], base_ns: int) -> dict[str, Any]:
    details = {"step": row["step"]}
    details |= {key: row[key] for key in ("chunk", "micro_batch", "peer") if row[key] >= 0}
    details |= {key: row[key] for key in ("group", "bytes") if row[key]}
    return {
        "ph": "X",
        "name": _title(row),
        "cat": row["kind"],
        "pid": row["rank"],
        "tid": lane[1],
        "ts": (row["start_ns"] - base_ns) / 1e3,
        "dur": (row["end_ns"] - row["start_ns"]) / 1e3,
        "args": details,
    }


def _title(row: dict[str, Any]) -> str:
    if row["kind"] == "step":
        return f"step {row['step']}"
    if row["kind"] in ("collective", "user"):
        return str(row["name"] or row["kind"])
    return f"{row['kind']} {row['name']}".rstrip()


def _arrows(
    transfers: Iterable[dict[str, Any]], places: dict[tuple[int, str, int, int, int], int], base_ns: int
) -> Iterator[dict[str, Any]]:
    """From the beginning of a send to just before the end of its receive, where both are shown."""
    for number, one in enumerate(transfers):
        sent = (one["from_rank"], one["group"], one["send_start_ns"], one["send_end_ns"], one["to_rank"])
        received = (one["to_rank"], one["group"], one["receive_start_ns"], one["receive_end_ns"], one["from_rank"])
        if sent not in places or received not in places:
            continue
        arrow = {"cat": "transfer", "name": one["name"] or "transfer", "id": number}
        end_ns = max(one["receive_start_ns"], one["receive_end_ns"] - 1)  # within the slice, or it binds to the next
        start = {"pid": one["from_rank"], "tid": places[sent], "ts": (one["send_start_ns"] - base_ns) / 1e3}
        yield {"ph": "s", **arrow, **start}
        end = {"pid": one["to_rank"], "tid": places[received], "ts": (end_ns - base_ns) / 1e3}
        yield {"ph": "f", "bp": "e", **arrow, **end}


def _describe(
    rows: Sequence[dict[str, Any]], lanes: Sequence[tuple[str, int]], trace: Trace
) -> Iterator[dict[str, Any]]:
    """Names and order of processes and lanes."""
    stages = {one["rank"]: one["stage"] for one in trace.groups().to_pylist() if one["stage"] is not None}
    hosts = {row["rank"]: row["host"] for row in rows}
    for rank in sorted(hosts):
        stage = f", stage {stages[rank]}" if rank in stages else ""
        yield _named("process_name", rank, name=f"rank {rank} ({hosts[rank]}{stage})")
        yield _named("process_sort_index", rank, sort_index=rank)
    for rank, name, number in sorted({(row["rank"], *lane) for row, lane in zip(rows, lanes, strict=True)}):
        title = name if name in _ORDER else f"communication {name}" if name != "communication" else name
        yield _named("thread_name", rank, number, name=title)
        yield _named("thread_sort_index", rank, number, sort_index=number)


def _named(what: str, rank: int, lane: int = 0, **details: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": details}


def _kineto_events(
    rows: Sequence[dict[str, Any]], groups: Sequence[str], members: dict[str, list[int]], base_ns: int
) -> Iterator[dict[str, Any]]:
    """A launch on the CPU and a kernel on a stream for each span; the launch is as early as the kernel."""
    for correlation, row in enumerate(rows, 1):
        at, length = (row["start_ns"] - base_ns) / 1e3, (row["end_ns"] - row["start_ns"]) / 1e3
        if row["kind"] == "wait":
            continue
        if row["kind"] in ("step", "data", "evaluation", "startup", "user", "persist", "snapshot"):
            name = f"ProfilerStep#{row['step']}" if row["kind"] == "step" else f"## {_title(row)} ##"
            cat, tid = "user_annotation", 1 if row["kind"] == "persist" else 0
            yield {"ph": "X", "cat": cat, "name": name, "pid": 1000, "tid": tid, "ts": at, "dur": length, "args": {}}
            continue
        details: dict[str, Any] = {"External id": correlation, "device": 0, "context": 1, "correlation": correlation}
        if row["kind"] == "collective":
            name, stream = f"ncclDevKernel_{row['name']}", _FIRST_GROUP_STREAM + groups.index(row["group"])
            ranks = members.get(row["group"], [])
            details |= {"Collective name": row["name"], "Process Group Description": row["group"]}
            details |= {"Group size": len(ranks), "Process Group Ranks": str(ranks), "dtype": "Byte"}
            details |= {"In msg nelems": row["bytes"], "Out msg nelems": row["bytes"]}
            if row["peer"] >= 0:
                details["Dst Rank" if "send" in row["name"] else "Src Rank"] = row["peer"]
        else:
            name, stream = _title(row), _COMPUTE_STREAM
        launch = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1000,
            "tid": 0,
            "ts": at,
            "dur": 0,
        }
        yield {**launch, "args": {"External id": correlation, "correlation": correlation}}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": at, "dur": length}
        yield {**kernel, "args": {**details, "stream": stream}}


def _write(file: BinaryIO, path: Path, head: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    """One event a line, so that text tools work on it and nothing is held twice."""
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, mtime=0) as packed:
            packed.writelines(_lines(head, events))
    else:
        file.writelines(_lines(head, events))


def _lines(head: dict[str, Any], events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    yield json.dumps(head)[:-1].encode() + b', "traceEvents": [\n'
    separator = b""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":")).encode()
        separator = b",\n"
    yield b"\n]}\n"
