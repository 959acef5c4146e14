"""What ranks that stand still have begun and not ended, read from their rings, and kept for when these are gone.

Spans are written when they end, so that what a hang is in is in none of them. Each ring holds besides, by type, the
newest span that has begun (`phalanx.telemetry.spans.Recorder.enter`). While training goes on nobody looks at that.
Where the rings of a host have stood still for longer than they usually do, its writer keeps it as
``telemetry/still/HOST-ATTEMPT.json``, which outlives the ranks; on the host itself the rings are read directly.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.core.files import write_json
from phalanx.ipc.processes import read_process
from phalanx.telemetry.spans import RingReader
from phalanx.telemetry.writer_place import rings_of

STILL_S = 3.0
"""So long a host's rings have to stand still before what has begun is kept, and twice as long as ever before."""

_MOST_STILL_S = 60.0
_AGAIN_S = 60.0  # kept again, so that the newest state of the processes is known
_FOLDER = "still"


@dataclass(frozen=True)
class Unfinished:
    """The newest span of a type that a rank has begun.

    Attributes:
        start_s: Unix time.
        number: how many of the type have begun; of a wait, the number of what is waited for.
        is_under_way: it has not ended; not known of collectives, whose waits say it.
    """

    kind: str
    name: str
    group: str
    ranks: tuple[int, ...]
    start_s: float
    step: int
    number: int
    peer: int
    micro_batch: int
    is_under_way: bool


@dataclass(frozen=True)
class RankAtRest:
    """A rank whose ring was looked at.

    Attributes:
        state: of its process, as in /proc, or ``gone``.
        looked_s: Unix time of the look.
        newest_s: Unix time of the newest thing that it has begun or ended; of none, of its ring.
        usual_step_s: median length of its steps; 0: none has ended.
        begun: the newest of each type, the last begun last.
        is_kept: by the writer of its host, which had found that the host stood still; not looked at just now.
        cpu_share: of a core, that its process has used between two looks of that writer; below 0: not known.
    """

    rank: int
    attempt: int
    host: str
    pid: int
    state: str
    looked_s: float
    newest_s: float
    usual_step_s: float
    begun: tuple[Unfinished, ...]
    is_kept: bool = False
    cpu_share: float = -1.0

    @property
    def still_s(self) -> float:
        """For how long it had begun and ended nothing when it was looked at."""
        return self.looked_s - self.newest_s


def look_at(reader: RingReader, host: str) -> RankAtRest:
    """What a rank is in, by its ring and its process; it is not disturbed."""
    process = read_process(reader.pid)
    is_alive = process is not None and process.is_alive and not reader.is_orphan
    offset_ns = reader.unix_offset_ns
    begun = reader.begun()
    newest_ns = max(reader.newest_end_ns(), max((one.start_ns for one in begun), default=0))
    return RankAtRest(
        reader.rank,
        reader.attempt,
        host,
        reader.pid,
        process.state if process is not None and is_alive else "gone",
        time.time(),
        (newest_ns + offset_ns if newest_ns else reader.opened_unix_ns) / 1e9,
        reader.usual_step_ns() / 1e9,
        tuple(
            Unfinished(
                one.type.kind,
                one.type.name,
                one.type.group,
                one.type.ranks,
                (one.start_ns + offset_ns) / 1e9,
                one.step,
                one.number,
                one.peer,
                one.micro_batch,
                one.is_under_way,
            )
            for one in begun
        ),
    )


class StillRings:
    """The writer's side: keeps what has begun once all rings of the host stand still.

    Args:
        folder: of telemetry.
    """

    def __init__(self, folder: Path, host: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._host, self._clock_s = folder / _FOLDER, host, clock_s
        self._moved_s, self._longest_s = clock_s(), -1.0  # until the first spans come: starting says nothing of steps
        self._kept_s: float | None = None
        self._again_s: float | None = None  # when spans came again after the last time that something was kept
        self._files: set[Path] = set()
        self._kept_step = -1  # the newest in which a rank was when it was kept
        self._used: dict[tuple[int, int], tuple[float, float]] = {}  # by rank: when, and its CPU seconds

    def moved(self, readers: Iterable[RingReader] = ()) -> None:
        """Spans have come. Where they go on coming, or steps have ended since, what was kept is not true any more."""
        now_s = self._clock_s()
        self._longest_s = 0.0 if self._longest_s < 0 else max(self._longest_s, now_s - self._moved_s)
        self._moved_s, self._kept_s, self._used = now_s, None, {}
        self._again_s = now_s if self._again_s is None else self._again_s
        if not self._files:
            return
        # Ranks that are interrupted end their spans too, but only once, and begin no steps.
        if now_s - self._again_s > STILL_S or _newest_step(readers) > self._kept_step + 1:
            for path in self._files:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            self._files.clear()

    def look(self, readers: Iterable[RingReader]) -> None:
        """Keep what has begun, if it is time.

        Raises:
            OSError: it cannot be written.
        """
        now_s = self._clock_s()
        patience_s = max(STILL_S, min(2 * self._longest_s, _MOST_STILL_S))
        due_s = self._moved_s + patience_s if self._kept_s is None else self._kept_s + _AGAIN_S
        if now_s < due_s:
            if now_s >= self._moved_s + patience_s / 2 and not self._used:
                self._used = {(one.attempt, one.rank): (now_s, _cpu_s(one.pid)) for one in readers}
            return
        self._kept_s, self._again_s = now_s, None
        by_attempt: dict[int, list[dict[str, Any]]] = {}
        readers = list(readers)
        self._kept_step = _newest_step(readers)
        for reader in readers:
            if not reader.is_closed:
                one = replace(look_at(reader, self._host), cpu_share=self._cpu_share(reader, now_s))
                by_attempt.setdefault(reader.attempt, []).append(asdict(one))
        for attempt, ranks in by_attempt.items():
            path = self._folder / f"{self._host}-{attempt}.json"
            if path in self._files and all(one["state"] == "gone" for one in ranks):
                continue  # they were killed since: what they stood still in says more
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(path, {"ranks": ranks})
            self._files.add(path)

    def _cpu_share(self, reader: RingReader, now_s: float) -> float:
        rank, used_s = (reader.attempt, reader.rank), _cpu_s(reader.pid)
        before_s, used_before_s = self._used.get(rank, (now_s, used_s))
        self._used[rank] = now_s, used_s
        return (used_s - used_before_s) / (now_s - before_s) if now_s > before_s and used_s >= used_before_s else -1.0


def _newest_step(readers: Iterable[RingReader]) -> int:
    return max((one.step for reader in readers if not reader.is_closed for one in reader.begun()), default=-1)


def _cpu_s(pid: int) -> float:
    process = read_process(pid)
    return -1.0 if process is None else process.cpu_ticks / os.sysconf("SC_CLK_TCK")


def ranks_at_rest(run: Path) -> list[RankAtRest]:
    """Ranks of the newest attempt of a run: those on this host as they are now, of others what their writers kept.

    Empty: nothing was kept, and no rank of the run is on this host.
    """
    folder = run.resolve() / "telemetry"
    found = {(one.attempt, one.rank): one for one in _kept(folder)}
    here = _on_this_host(folder)
    alive = {one.attempt for one in here if one.state != "gone"}
    for one in here:
        # once all were killed, their rings say that they are dead, and what was kept says in what they stood still
        if one.attempt in alive or (one.attempt, one.rank) not in found:
            found[one.attempt, one.rank] = one
    newest = max((attempt for attempt, _ in found), default=0)
    return [one for (attempt, _), one in sorted(found.items()) if attempt == newest]


def _on_this_host(folder: Path) -> list[RankAtRest]:
    host = socket.gethostname()
    found = []
    for path in sorted(rings_of(folder).glob("*.ring")):
        with contextlib.suppress(OSError, ValueError):  # it is gone again, or of another version
            reader = RingReader(path)
            if not reader.is_closed:
                found.append(look_at(reader, host))
            reader.close()
    return found


def _kept(folder: Path) -> list[RankAtRest]:
    found = []
    for path in sorted((folder / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # cut off: as if it were not there
            found += [_rank_of(one) for one in json.loads(path.read_text())["ranks"]]
    return found


def _rank_of(one: Mapping[str, Any]) -> RankAtRest:
    begun: Sequence[Mapping[str, Any]] = one["begun"]
    return RankAtRest(
        **{
            **one,
            "is_kept": True,
            "begun": tuple(Unfinished(**{**each, "ranks": tuple(each["ranks"])}) for each in begun),
        }
    )
