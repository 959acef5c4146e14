"""What NCCL and its watchers write: dumps of torch's flight recorder, and NCCL Inspector's lines of JSON.

Neither knows of steps: all is step 0, from the first collective to the last. A flight record says when a collective was
launched; when it began and ended only where ``TORCH_NCCL_ENABLE_TIMING`` was set. What had not ended when it was dumped
lasts until the newest launch of all ranks, and a ``user`` span besides says so.

The recorder's ring holds other parts of the past on each rank. What joins collectives of ranks is their number in the
group, which ``micro_batch`` holds (modulo 32,768); transfers have none that both sides share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.flight_dump import FlightRecordError, read_dump
from phalanx.telemetry.spans import NONE
from phalanx.telemetry.trace_imports.rows import ITEM_BYTES, ImportedRank, ImportedSpan, axis_of

UNFINISHED = "not ended: "

_TRANSFER = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
_RANK_OF_FILE = re.compile(r"(\d+)(?:\.\w+)?$")


def read_flight_dumps(paths: Sequence[Path]) -> dict[int, ImportedRank]:
    """A dump for each rank; the rank is the number at the end of the file's name, as torch names them.

    Raises:
        UserError: a file is not a dump, or its name lacks a number.
    """
    dumps: dict[int, dict[str, Any]] = {}
    for path in paths:
        number = _RANK_OF_FILE.search(path.name)
        if number is None:
            raise UserError("does not say its rank", cure="let the name end with it, such as dump_3", field=str(path))
        try:
            dumps[int(number.group(1))] = read_dump(path)
        except (FlightRecordError, OSError) as error:
            raise UserError(
                f"is not a dump of a flight recorder: {error}", cure="leave it out", field=str(path)
            ) from error
    newest_ns = max((_time_ns(one, "time_created_ns") for dump in dumps.values() for one in dump["entries"]), default=0)
    found = {}
    for rank, dump in sorted(dumps.items()):
        config = dump.get("pg_config") or {}
        members = {
            str(name): tuple(map(int, re.findall(r"\d+", str(one.get("ranks", ""))))) for name, one in config.items()
        }
        own = ImportedRank(f"rank-{rank}")
        for entry in dump["entries"]:
            name, group = _group(entry)
            own.groups.setdefault(group, members.get(name, ()))
            span = _flight_span(entry, group, members.get(name, ()), newest_ns)
            own.spans.append(span)
            if entry.get("state") != "completed":
                title = f"{UNFINISHED}{span.name} {group}"
                own.spans.append(ImportedSpan(0, "user", title, span.start_ns, span.end_ns, peer=span.peer))
        own.groups = {group: ranks for group, ranks in own.groups.items() if ranks}
        found[rank] = _as_one_step(own)
    return found


def _flight_span(entry: dict[str, Any], group: str, members: Sequence[int], newest_ns: int) -> ImportedSpan:
    title = str(entry.get("profiling_name", "")).rpartition(":")[2]
    transfer = _TRANSFER.match(title)
    name, peer = title.split(" ")[0] or "collective", NONE
    if transfer:
        peer = int(transfer.group(3))
        peer = members[peer] if peer < len(members) else peer
    start_ns = _time_ns(entry, "time_discovered_started_ns") or _time_ns(entry, "time_created_ns")
    if entry.get("state") == "completed":
        end_ns = _time_ns(entry, "time_discovered_completed_ns") or start_ns
    else:
        end_ns = newest_ns
    number = entry.get("collective_seq_id", entry.get("seq_id"))
    number = number % (1 << 15) if isinstance(number, int) and not transfer else NONE
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    num_bytes = 0
    for size, type_ in zip(sizes, types, strict=False):
        values = 1
        for side in size:
            values *= int(side)
        num_bytes += values * ITEM_BYTES.get(str(type_), 1)
    return ImportedSpan(
        0,
        "collective",
        name,
        start_ns,
        max(start_ns, end_ns),
        group,
        micro_batch=number,
        peer=peer,
        num_bytes=min(num_bytes, 1 << 62),
    )


def _group(entry: dict[str, Any]) -> tuple[str, str]:
    """Name on this rank, which others may give to another group, and description."""
    group = entry.get("process_group", entry.get("pg_name", ""))
    name, description = (group[0], group[-1]) if isinstance(group, list) and group else (group, group)
    return str(name), axis_of(str(description))


def _time_ns(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def is_inspector_file(path: Path) -> bool:
    """Whether its first line is one of NCCL Inspector."""
    try:
        return next(iter(_objects(path.read_text(errors="replace"))), {}).keys() >= {"header", "coll_perf"}
    except (OSError, AttributeError):
        return False


def read_inspector_files(paths: Iterable[Path]) -> dict[int, ImportedRank]:
    """NCCL Inspector's files of all ranks.

    Ranks are those of each communicator, so that only those of the largest are taken for ranks of the job; others
    cannot be told apart and are left out. Without verbose output a collective is known by its length and by when it was
    written, which is a little after its end.
    """
    lines = [one for path in paths for one in _objects(path.read_text(errors="replace"))]
    largest = max((one["header"]["n_ranks"] for one in lines if "header" in one), default=0)
    communicators = {one["header"]["id"] for one in lines if one["header"]["n_ranks"] == largest}
    found: dict[int, ImportedRank] = {}
    for one in lines:
        head, performed = one["header"], one["coll_perf"]
        if head["n_ranks"] != largest:
            continue
        group = "world" if len(communicators) == 1 else f"world {head['id']}"
        own = found.setdefault(head["rank"], ImportedRank(str(one.get("metadata", {}).get("hostname", "unknown"))))
        own.groups[group] = tuple(range(largest))
        length_ns = round(performed["coll_exec_time_us"] * 1000)
        times = performed.get("event_trace_ts", {}).get("kernel_events", [])
        if times:
            end_ns = max(round(event["kernel_stop_ts"] * 1000) for event in times)
        else:
            end_ns = round(one["metadata"]["dump_timestamp_us"] * 1000)
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", performed["coll"]).lower()
        num_bytes = int(performed["coll_msg_size_bytes"])
        own.spans.append(ImportedSpan(0, "collective", name, end_ns - length_ns, end_ns, group, num_bytes=num_bytes))
    return {rank: _as_one_step(own) for rank, own in sorted(found.items())}


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects one after the other, on one line each or on many; a torn one ends it."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            one, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield one


def _as_one_step(rank: ImportedRank) -> ImportedRank:
    if rank.spans:
        start_ns, end_ns = min(one.start_ns for one in rank.spans), max(one.end_ns for one in rank.spans)
        rank.spans.append(ImportedSpan(0, "step", "", start_ns, max(end_ns, start_ns + 1)))
    return rank
