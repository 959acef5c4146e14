"""What of a run's telemetry is lost: files that cannot be read, and spans that were dropped before anybody read them.

Whatever is asked of such a run is answered from the rest, so that the answer has to say what is not in it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from phalanx.telemetry.span_store import is_whole, parts

DROPPED = "dropped"
"""Folder of notes, in that of telemetry."""

_MOST_NAMED = 3


@dataclass(frozen=True)
class Loss:
    """What is lost of a run; it is false where nothing is.

    Attributes:
        damaged: files that were cut off or cannot be decoded, by table.
        dropped: spans by host.
        unknown: hosts that dropped spans, and whose disk did not take even the note of how many.
        without_steps: hosts whose spans are there, and whose sums of steps are not.
    """

    damaged: Mapping[str, tuple[Path, ...]]
    dropped: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    without_steps: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.damaged or self.dropped or self.unknown or self.without_steps)

    def lines(self) -> Iterator[tuple[str, str]]:
        """What is lost, and what that means, for people."""
        for table, paths in self.damaged.items():
            more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
            names = ", ".join(map(str, paths[:_MOST_NAMED])) + more
            yield f"{len(paths)} file{'s' * (len(paths) > 1)} of {table}", f"damaged or cut off, left out: {names}"
        if self.dropped:
            hosts = [f"{host}: {count:,}" for host, count in self.dropped.items()]
            named = ", ".join(hosts[:_MOST_NAMED]) + (" …" if len(hosts) > _MOST_NAMED else "")
            yield (
                f"{sum(self.dropped.values()):,} spans",
                f"dropped before they were kept ({named}), so that steps are missing or lack parts:"
                " record fewer spans a step, and see to the disk",
            )
        if self.without_steps:
            named = ", ".join(self.without_steps[:_MOST_NAMED]) + (
                " …" if len(self.without_steps) > _MOST_NAMED else ""
            )
            yield (
                f"sums of all steps of {named}",
                "telemetry/steps is not there, though spans were recorded: it was removed, or not copied; copy the"
                " folder telemetry as a whole",
            )
        if self.unknown:
            named = ", ".join(self.unknown[:_MOST_NAMED]) + (" …" if len(self.unknown) > _MOST_NAMED else "")
            yield (
                f"spans of {named}, nobody knows how many",
                "dropped, and the disk had no room to note it, so that steps are missing or lack parts:"
                " see to the disk",
            )

    @property
    def sentences(self) -> list[str]:
        """The same, a line each."""
        return [f"{what}: {how}" for what, how in self.lines()]

    def as_json(self) -> dict[str, Any]:
        """``damaged_files`` and ``spans_dropped`` by host."""
        return {
            "damaged_files": [str(path) for paths in self.damaged.values() for path in paths],
            "spans_dropped": dict(self.dropped),
            "spans_dropped_unknown": list(self.unknown),
            "hosts_without_steps": list(self.without_steps),
        }


def note_dropped(folder: Path, host: str, count: int) -> None:
    """Add spans of a host that were dropped since the last note; a run without a note lost none.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / DROPPED / f"{host}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"at_ns": time.time_ns(), "dropped": count}) + "\n")


def dropped_spans(folder: Path) -> dict[str, int]:
    """Spans that were dropped in the whole run, by host; counters, which know it too, are far more files."""
    found: Counter[str] = Counter()
    for path in sorted((folder / DROPPED).glob("*.jsonl")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a crash has torn
                    found[path.name.removesuffix(".jsonl")] += int(json.loads(line)["dropped"])
    return dict(found)


def unnoted_hosts(folder: Path) -> tuple[str, ...]:
    """Hosts whose note of dropped spans was begun and holds nothing: the disk was full."""
    known = dropped_spans(folder)
    return tuple(
        host
        for path in sorted((folder / DROPPED).glob("*.jsonl"))
        if (host := path.name.removesuffix(".jsonl")) not in known
    )


def hosts_without_steps(folder: Path) -> tuple[str, ...]:
    """Hosts of which single spans are there and no sums of steps, which are written first and kept for longer."""
    known = {part.stream[0] for part in parts(folder, "steps")}
    return tuple(sorted({part.stream[0] for part in parts(folder, "spans")} - known))


def damaged_parts(folder: Path, tables: tuple[str, ...], *, decode: bool = False) -> Iterator[tuple[str, Path]]:
    """Files that cannot be read, each with its table.

    Args:
        decode: all of each file, which takes as long as reading it; else only whether it begins and ends as it should.
    """
    if getattr(folder, "fs", None) is not None:
        return  # in object storage a file is there as a whole or not at all
    for table in tables:
        for part in parts(folder, table):
            try:
                is_good = is_whole(part.path)
                if is_good and decode:
                    _decode(part.path)
            except FileNotFoundError:  # its time was over meanwhile
                continue
            except PermissionError:
                raise
            except (OSError, pa.ArrowException):
                is_good = False
            if not is_good and part.path.exists():
                yield table, part.path


def _decode(path: Path) -> None:
    with pq.ParquetFile(path) as file:
        for _ in file.iter_batches():
            pass
