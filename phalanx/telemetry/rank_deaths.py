"""Ranks whose process ended without closing what it recorded into, and that recorded nothing since: they are dead.

The writer of their host notes such an end (`phalanx.telemetry.span_writer`). A later start of the run may have the same
number of attempt, so that only what was recorded afterwards says that a rank lives again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.files import open_regular

DIED = "rank died"
"""Kind of the incident."""

_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class Death:
    """The end of a rank's process, unasked: when it was noted, Unix, and in which attempt."""

    rank: int
    host: str
    attempt: int
    at_ns: int


def deaths_among(details: Iterable[str]) -> list[Death]:
    """Of incidents as JSON; others, and torn ones, are left out."""
    found = []
    for line in details:
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            if said["kind"] == DIED:
                place = int(said["rank"]), str(said.get("host", "")), int(said.get("attempt", 0))
                found.append(Death(*place, int(said["at_ns"])))
    return found


def dead_ranks(telemetry: Path) -> list[Death]:
    """The dead of the newest attempt, the first first, by the ends of files and their names alone.

    Args:
        telemetry: folder ``telemetry`` of a run that nobody writes to.
    """
    noted = _noted(telemetry / "incidents.jsonl")
    if not noted:
        return []
    from phalanx.telemetry.span_store import parts  # needs pyarrow, and few runs have such incidents

    written = parts(telemetry, "steps")
    newest = max([*(part.attempt for part in written), *(death.attempt for death in noted)])
    dead: dict[int, Death] = {}
    for death in noted:
        later = (part for part in written if part.attempt == newest and part.to_ms * 10**6 > death.at_ns)
        if death.attempt == newest and not any(part.first_rank <= death.rank <= part.last_rank for part in later):
            dead.setdefault(death.rank, death)
    return sorted(dead.values(), key=lambda death: (death.at_ns, death.rank))


def _noted(path: Path) -> list[Death]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return deaths_among(line for line in lines if DIED in line)
